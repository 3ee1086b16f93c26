"""Train the networks of Similarity of Neural Networks with Gradients (Tang et al. 2020): those that are not there yet.

    python papers/gradients/train.py --device cuda --workers 2     # all of them
    python papers/gradients/train.py --only cifar10,mnist
    python papers/gradients/train.py --small                       # a smoke run on a CPU: its numbers mean nothing

SOSIE_DATA names the folders with the images; of two packs of one set, the one in the folder named first is taken.
Each network is saved when it is trained, and results/networks.json written again: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from sosie.data import ImageData, open_images
from sosie.files import write_atomically
from sosie.models import NamedModel, Normalise, open_model, parse_normalisation
from sosie.train import Augment, accuracy, fit
from sosie.train import Recipe as TrainingRecipe

# How much of everything: the real run, and a smoke run. What the paper has instead is in [brackets].


RESNET18, RESNET50 = "resnet18", "resnet50"


@dataclass(frozen=True)
class DataSet:
    """Images of 32 × 32 × 3, and what of the training depends on them."""

    classes: int
    normalise: str  # mean and deviation of its training images, as sosie reads it
    rate: float  # the highest of the cycle [0.1, divided by ten every 80 epochs]
    mirror: bool  # whether a mirror image keeps its label


DATA_SETS = {
    # The deviations that the public code of the paper's networks has; the pixels' own are .2470 .2435 .2616.
    "cifar10": DataSet(10, "mean .4914 .4822 .4465 std .2023 .1994 .2010", rate=0.2, mirror=True),
    "cifar100": DataSet(100, "mean .5075 .4867 .4411 std .2673 .2565 .2762", rate=0.2, mirror=True),
    # In place of SVHN: grey digits with a black border of two pixels, repeated on three channels.
    "mnist": DataSet(10, "mean .1004 .1004 .1004 std .2755 .2755 .2755", rate=0.1, mirror=False),
}


@dataclass(frozen=True)
class Recipe:
    """All that decides how one network is trained, but for its seed and the images that are at hand."""

    dataset: str
    architecture: str
    epochs: int
    batch: int
    rate: float
    decay: float
    pad: int  # crops are taken from images with a black border this wide
    mirror: bool
    normalise: str
    mixed: bool  # bfloat16 and channels last
    train_images: int | None  # at most; None for all that are found
    test_images: int | None


@dataclass(frozen=True)
class Settings:
    """The real run."""

    datasets: tuple[str, ...] = tuple(DATA_SETS)  # [SVHN in place of MNIST]
    resnet18_seeds: int = 5  # [ten]
    resnet50_seeds: int = 1
    resnet18_epochs: int = 30  # [200]
    resnet50_epochs: int = 30  # [200]
    batch: int = 512  # [128]
    decay: float = 5e-4  # [1e-4, over seven times the epochs]
    pad: int = 4
    mixed: bool = True
    train_images: int | None = None
    test_images: int | None = None

    def networks(self) -> list[tuple[str, str, int]]:
        """Data set, architecture and seed of each; in an order that leaves a run cut short with some of all."""
        sizes = ((RESNET18, self.resnet18_seeds), (RESNET50, self.resnet50_seeds))
        return [(data, name, seed) for name, seeds in sizes for seed in range(seeds) for data in self.datasets]

    def recipe(self, dataset: str, architecture: str) -> Recipe:
        if dataset not in DATA_SETS:
            raise ValueError(f"no data set {dataset!r} in this study; there are {', '.join(DATA_SETS)}")
        epochs = {RESNET18: self.resnet18_epochs, RESNET50: self.resnet50_epochs}
        if architecture not in epochs:
            raise ValueError(f"no architecture {architecture!r} in this study; there are {', '.join(epochs)}")
        data = DATA_SETS[dataset]
        return Recipe(
            dataset,
            architecture,
            epochs=epochs[architecture],
            batch=self.batch,
            rate=data.rate,
            decay=self.decay,
            pad=self.pad,
            mirror=data.mirror,
            normalise=data.normalise,
            mixed=self.mixed,
            train_images=self.train_images,
            test_images=self.test_images,
        )


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    return replace(
        full,
        resnet18_seeds=1,
        resnet18_epochs=1,
        resnet50_epochs=1,
        batch=8,
        train_images=16,
        test_images=16,
    )


# The networks of the study, trained where no checkpoint of the same recipe is found, and their images.


HERE = Path(__file__).resolve().parent
CHECKPOINTS = HERE / "nets"
FULL = Settings()


def trained(
    dataset: str, architecture: str, seed: int, device: str, *, cache: Path = CHECKPOINTS, settings: Settings = FULL
) -> tuple[NamedModel, float]:
    """The network on the device, with its own normalisation, and its accuracy on the test images."""
    recipe = settings.recipe(dataset, architecture)
    path = checkpoint(recipe, seed, cache)
    if not path.is_file():
        _train(recipe, seed, device, path)
    found = open_model(f"{architecture}@{path}")
    found.model.to(device)
    return found, float(read_record(path)["accuracy"])


def checkpoint(recipe: Recipe, seed: int, cache: Path) -> Path:
    """Where the network is kept: another recipe is another file."""
    key = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:8]
    return cache / f"{recipe.dataset}-{recipe.architecture}-seed{seed}-{key}.safetensors"


def read_record(path: Path) -> dict[str, Any]:
    """What was written down when the network was trained."""
    with safe_open(path, framework="pt") as file:
        record: dict[str, Any] = json.loads(file.metadata()["record"])
    return record


@functools.cache
def read(dataset: str, split: str, limit: int | None, device: str) -> tuple[Tensor, Tensor, str]:
    """Images as uint8 (count, 3, 32, 32) and labels, on the device, and the name of the set that was found.

    Grey images are padded to 32 × 32 and repeated on three channels.
    """
    found = open_images(dataset, split=split, max_rows=limit)
    if not isinstance(found, ImageData) or found.labels is None:
        raise ValueError(f"{dataset} ({split}) has no labels: the study needs them")
    images = found.images
    if images.shape[1] == 1:
        images = functional.pad(images, [2, 2, 2, 2]).expand(-1, 3, -1, -1).contiguous()
    if images.shape[1:] != (3, 32, 32):
        raise ValueError(f"{found.name}: the study takes 32 × 32 × 3 or 28 × 28 images, got {tuple(images.shape)}")
    return images.to(device), found.labels.to(device), found.name


def _train(recipe: Recipe, seed: int, device: str, path: Path) -> None:
    images, labels, name = read(recipe.dataset, "train", recipe.train_images, device)
    test_images, test_labels, test_name = read(recipe.dataset, "test", recipe.test_images, device)
    classes = DATA_SETS[recipe.dataset].classes
    start = time.perf_counter()
    model = open_model(f"{recipe.architecture}(classes={classes}, stem='cifar', seed={seed})").model.to(device)
    prepare = _resident(parse_normalisation(recipe.normalise), device)
    fit(
        model,
        images,
        labels,
        recipe=TrainingRecipe(
            epochs=recipe.epochs,
            batch=recipe.batch,
            rate=recipe.rate,
            optimiser="sgd",
            decay=recipe.decay,
            augment=Augment(recipe.pad, recipe.mirror),
            prepare=prepare,
            mixed=recipe.mixed,
        ),
        seed=seed,
        task=f"training {path.stem}",
    )
    reached = accuracy(model, test_images, test_labels, prepare=prepare)
    seconds = time.perf_counter() - start  # the accuracy has waited for the device
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    if broken := [key for key, value in state.items() if not value.isfinite().all()]:
        raise ValueError(f"{path.stem} has diverged (first in {broken[0]}): lower the rate of its data set in train.py")
    record = {
        "dataset": recipe.dataset,
        "architecture": recipe.architecture,
        "seed": seed,
        "accuracy": reached,
        "seconds": round(seconds, 1),
        "trained_on": f"{len(images):,} images of {name}",
        "tested_on": f"{len(test_images):,} images of {test_name}",
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "torch": torch.__version__,
        "recipe": asdict(recipe),
    }
    metadata = {"normalise": recipe.normalise, "record": json.dumps(record)}
    write_atomically(path, lambda temporary: save_file(state, temporary, metadata))


def _resident(normalise: Normalise | None, device: str) -> Callable[[Tensor], Tensor]:
    """The normalisation with its numbers on the device: sent there anew, they would hold up every step."""
    assert normalise is not None, "every data set of the study has a normalisation"
    mean, std = (torch.tensor(numbers, device=device).view(-1, 1, 1) for numbers in (normalise.mean, normalise.std))
    return lambda x: (x - mean) / std


# The command line.


Network = tuple[str, str, int]  # data set, architecture, seed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the networks that papers/gradients compares.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, help="the folder of the checkpoints")
    parser.add_argument("--results", type=Path, help="the folder to write networks.json to")
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(DATA_SETS)}, resnet18, resnet50")
    parser.add_argument("--workers", type=int, default=1, help="networks trained side by side, a process each")
    parser.add_argument("--small", action="store_true", help="a smoke run: its numbers mean nothing")
    given = parser.parse_args()
    given.only = {name.strip() for name in given.only.split(",") if name.strip()}
    known = {*DATA_SETS, "resnet18", "resnet50"}
    if unknown := sorted(given.only - known):
        parser.error(f"nothing is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if given.workers < 1:
        parser.error(f"--workers is a number from 1 up, got {given.workers}")
    given.results = given.results or HERE / ("small" if given.small else "results")
    given.cache = (given.cache or (given.results / "nets" if given.small else CHECKPOINTS)).resolve()
    return given


def wanted(only: set[str], settings: Settings) -> list[Network]:
    """What is named, of data sets and of architectures; where none of a kind is named, all of it."""
    found = settings.networks()
    for kind in (0, 1):
        named = only & {str(network[kind]) for network in found}
        found = [network for network in found if not named or network[kind] in named]
    return found


def train(network: Network, device: str, cache: Path, settings: Settings) -> str | None:
    """One network; what went wrong as text, for the others go on."""
    torch.backends.cudnn.benchmark = True  # all batches but the last of an epoch have one shape
    try:
        trained(*network, device, cache=cache, settings=settings)
    except Exception:
        return traceback.format_exc()
    return None


def train_all(
    networks: list[Network], workers: int, device: str, cache: Path, settings: Settings
) -> Iterator[tuple[Network, str | None]]:
    """Each network and what went wrong, as they are done."""
    if workers == 1:
        for network in networks:
            yield network, train(network, device, cache, settings)
        return
    # Spawned, not forked: a fork cannot use CUDA.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        started = {pool.submit(train, network, device, cache, settings): network for network in networks}
        for done in as_completed(started):
            yield started[done], str(done.exception()) if done.exception() else done.result()


def write_results(path: Path, cache: Path, settings: Settings, is_small: bool) -> None:
    """All networks of these settings that are in the cache, whichever run trained them."""
    rows = []
    for dataset, architecture, seed in settings.networks():
        file = checkpoint(settings.recipe(dataset, architecture), seed, cache)
        if file.is_file():
            rows.append({**read_record(file), "file": file.name})
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[f"{row['dataset']}_{row['architecture']}_accuracy"].append(row["accuracy"])
    numbers: dict[str, Any] = {name: fmean(values) for name, values in groups.items()}
    whole = {"experiment": "networks", "small": is_small, "numbers": numbers, "networks": rows}
    write_atomically(path, json.dumps(whole, indent=1) + "\n")


def main() -> None:
    given = parse()
    settings = small(Settings()) if given.small else Settings()
    networks = wanted(given.only, settings)
    results = given.results / "networks.json"
    failed = []
    print(f"{'data set':9} {'network':9} {'seed':>4}  {'accuracy':>8}  {'seconds':>7}  trained on", flush=True)
    for network, trouble in train_all(networks, given.workers, given.device, given.cache, settings):
        dataset, architecture, seed = network
        start = f"{dataset:9} {architecture:9} {seed:4}  "
        if trouble:
            failed.append(f"{dataset} {architecture} {seed}")
            print(f"{start}failed\n{trouble}", flush=True)
            continue
        row = read_record(checkpoint(settings.recipe(dataset, architecture), seed, given.cache))
        print(f"{start}{row['accuracy']:8.4f}  {row['seconds']:7.1f}  {row['trained_on']}", flush=True)
        write_results(results, given.cache, settings, given.small)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
