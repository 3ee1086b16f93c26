"""Figures 5, 9, 10, 11 and 12: every block of one network against every block of another, by CKA."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import numpy as np
from represent import SITES, available, represent
from running import remember
from settings import RESNET18, RESNET50, Study

import sosie

REPRESENTATIONS = ("hadamard", "features", "gradients")  # figures 5, 9, 10
ALGORITHM_1 = "hadamard_of_sketches"


def figure_5(study: Study) -> dict[str, Any]:
    """ResNet-18, two seeds a data set; sketches of one data set share their rows.

    And by the paper's algorithm 1, CKA as it is printed, with common sketches and with a sketch for each network.
    """
    maps: dict[str, Any] = {}
    for a, b in itertools.combinations_with_replacement(study.training.datasets, 2):
        asked = {
            "recipes": [asdict(study.training.recipe(data, RESNET18)) for data in (a, b)],
            "images": [available(data, study) for data in (a, b)],
            "size": study.size,
            "seeds": len(study.seeds),
        }
        part = remember(study.cache, f"figure-5-{a}-{b}", asked, partial(maps_of, a, b, study))
        for representation in (*REPRESENTATIONS, "algorithm_1", "algorithm_1_independent"):
            maps.setdefault(representation, {})[f"{a}-{b}"] = part[representation]
    found = {f"algorithm_1_{key}": value for key, value in numbers(maps["algorithm_1"]).items()}
    apart = numbers(maps["algorithm_1_independent"])
    found |= {f"algorithm_1_independent_{key}": value for key, value in apart.items()}
    return {"numbers": {**numbers(maps["hadamard"]), **found}, "sites": SITES[RESNET18], "maps": maps}


def maps_of(a: str, b: str, study: Study) -> dict[str, Any]:
    """Every representation of one pair of data sets; the second network of algorithm 1 also with its own sketch."""
    one = whole(a, 0, study, 0)
    other = whole(b, min(1, max(study.seeds)), study, 0)
    found = {kernel: heat_map(one, other, kernel, a == b) for kernel in REPRESENTATIONS}
    found["algorithm_1"] = heat_map(one, other, ALGORITHM_1, a == b, "kernel_alignment")
    apart = whole(b, min(1, max(study.seeds)), study, 1)
    found["algorithm_1_independent"] = heat_map(one, apart, ALGORITHM_1, False, "kernel_alignment")
    return found


@lru_cache(maxsize=4)
def whole(data: str, seed: int, study: Study, sketch_seed: int) -> Any:
    """A network on all training images of its data set; a sketch of ten sites is of some gigabytes."""
    kernels = (*REPRESENTATIONS, ALGORITHM_1)
    return represent(data, seed, study, kernels=kernels, sketch_seed=sketch_seed, count=study.whole_images)


def figure_11(study: Study) -> dict[str, Any]:
    """ResNet-50 against itself and against ResNet-18 (figure 12), by features and gradients together."""
    deep = {d: represent(d, 0, study, kernels=("hadamard",), architecture=RESNET50) for d in study.training.datasets}
    flat = {d: represent(d, 0, study, kernels=("hadamard",)) for d in study.training.datasets}
    maps: dict[str, Any] = {"resnet50": {}, "resnet18-resnet50": {}}
    for a, b in itertools.combinations_with_replacement(study.training.datasets, 2):
        maps["resnet50"][f"{a}-{b}"] = heat_map(deep[a], deep[b], "hadamard", a == b)
    for a, b in itertools.product(study.training.datasets, repeat=2):
        maps["resnet18-resnet50"][f"{a}-{b}"] = heat_map(flat[a], deep[b], "hadamard", a == b)
    own = {d: np.array(maps["resnet18-resnet50"][f"{d}-{d}"]["value"]) for d in study.training.datasets}
    depth = [np.corrcoef(np.arange(len(m)), m.argmax(1))[0, 1] for m in own.values() if m.argmax(1).std() > 0]
    return {
        "numbers": {"best_match_deepens": float(np.mean(depth)) if depth else 0.0},
        "sites": SITES,
        "maps": maps,
    }


def heat_map(a: Any, b: Any, kernel: str, shared: bool, measure: str = "linear_cka") -> dict[str, Any]:
    compare = sosie.compare if shared else sosie.compare_unpaired
    c = compare(a.using(kernel), b.using(kernel), measures=measure)
    values = c[measure]
    assert values.null is not None
    return {"value": values.value.round(4).tolist(), "chance": values.null.round(4).tolist()}


def numbers(maps: dict[str, Any]) -> dict[str, float]:
    """Blocks are counted from 1, the stem; 9 and 10 are the last block and the pooled output."""

    def at(pair: str, rows: slice, columns: slice, what: str = "value") -> float:
        return float(np.array(maps[pair][what])[rows, columns].mean())

    late, early = slice(8, 10), slice(0, 7)
    digits_late = [at(f"{d}-mnist", late, late) for d in ("cifar10", "cifar100")]
    digits_late_chance = [at(f"{d}-mnist", late, late, "chance") for d in ("cifar10", "cifar100")]
    step = {}
    for data in ("cifar10", "cifar100"):
        own = np.array(maps[f"{data}-{data}"]["value"])
        drops = [1 - own[i, i + 1] for i in range(len(own) - 1)]
        step[data] = sorted(range(len(drops)), key=lambda i: -drops[i])[:2]
    return {
        "late_digits_with_late_cifar": float(np.mean(digits_late)),
        "late_digits_with_late_cifar_chance": float(np.mean(digits_late_chance)),
        "cifar100_with_early_cifar10": at("cifar10-cifar100", early, slice(0, 10)),
        "cifar100_with_early_cifar10_chance": at("cifar10-cifar100", early, slice(0, 10), "chance"),
        "same_data_late": float(np.mean([at(f"{d}-{d}", late, late) for d in ("cifar10", "cifar100", "mnist")])),
        "largest_steps_at_3_and_8": float(np.mean([len({2, 7} & set(s)) / 2 for s in step.values()])),
    }
