"""A network on a data set, as a sketch: what all experiments begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, stdev
from typing import Any, TypeVar

from networks import read, trained
from settings import RESNET18, Study
from torch import Tensor

import sosie

T = TypeVar("T")
Batches = list[tuple[Tensor, Tensor]]
# The stem, every residual block, and what is pooled of the last one.
SITES = {
    "resnet18": ["relu", *(f"layer{i}.{j}" for i in range(1, 5) for j in range(2)), "avgpool"],
    "resnet50": ["relu", *(f"layer{i}.{j}" for i, n in enumerate((3, 4, 6, 3), 1) for j in range(n)), "avgpool"],
}
STAND_IN = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST (for SVHN)"}


def batches(dataset: str, count: int, study: Study, split: str = "train") -> Batches:
    """Images in [0, 1] and labels, on the device."""
    images, labels, _ = read(dataset, split, count, study.device)
    steps = range(0, len(images), study.batch)
    return [(images[i : i + study.batch].float() / 255, labels[i : i + study.batch]) for i in steps]


def available(dataset: str, study: Study) -> int:
    """How many training images of a data set there are, up to all that are wanted."""
    return len(read(dataset, "train", study.whole_images, study.device)[0])


def network(dataset: str, seed: int, study: Study, architecture: str = RESNET18) -> Any:
    return trained(dataset, architecture, seed, study.device, cache=study.cache, settings=study.training)[0]


def represent(
    dataset: str,
    seed: int,
    study: Study,
    *,
    kernels: Sequence[str],
    sketch_seed: int = 0,
    architecture: str = RESNET18,
    on: str | None = None,
    count: int | None = None,
    size: int | None = 0,
    sites: Sequence[str] | None = None,
) -> Any:
    """The sketch of a network on its own data, or `on` another data set's."""
    sketch = sosie.sketch(
        network(dataset, seed, study, architecture),
        batches(on or dataset, count or study.images, study),
        sites=list(sites or SITES[architecture]),
        size=study.size if size == 0 else size,
        seed=sketch_seed,
        kernels=list(kernels),
    )
    return sketch.to(study.device)


def in_threads(work: Callable[[Any], T], items: Iterable[Any], threads: int = 16) -> list[T]:
    """Factorisations of many small matrices, side by side."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def mean(values: Sequence[float]) -> float:
    return fmean(values)


def spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
