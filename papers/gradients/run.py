"""Similarity of Neural Networks with Gradients (Tang et al. 2020): every figure, on networks of our own training.

    python papers/gradients/train.py --device cuda --workers 2    # the networks, once
    python papers/gradients/run.py                                # all of it, on the same machine
    python papers/gradients/run.py --only figure-1 --resume
    python papers/gradients/run.py --small                        # a smoke run on a CPU: its numbers mean nothing
    python papers/gradients/draw.py                               # the figures, from results/*.json

SOSIE_DATA and SOSIE_WEIGHTS name the folders with the images and EfficientNet-Lite0 (README.md says which). Figures 4,
5 and 13 are of all training images, as many of each data set as the smallest has where norms are compared (so have
MNIST's 60,000 at hand); they write each part when it is done (nets/, or the folder SOSIE_CHECKPOINTS, which must be
train.py's --cache), and a run that was ended goes on behind it.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import sosie
from sosie.benchmark import linear_probe
from sosie.models import open_model
from sosie.sketching import classify, fisher_rao_norm, task2vec
from sosie.train import Recipe

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import running
from running import remember
from train import RESNET18, RESNET50, Settings, read, small, trained

# What is measured on the networks: the real run, and a smoke run.


@dataclass(frozen=True)
class Study:
    """What is measured on the networks."""

    device: str
    results: Path
    cache: Path
    training: Settings = Settings()
    images: int = 10_000  # of each data set that a network is represented on
    whole_images: int = 50_000  # the same for figures 4, 5, 6, 9, 10 and 13, at most: the training images, as the paper
    norm_images: int = 2_000  # for Task2Vec and the Fisher-Rao norm
    size: int = 512  # buckets of a sketch, as in the paper
    batch: int = 500
    other_seeds: int = 2  # networks a data set for the representations of figures 7 and 8
    bound_images: int = 2_000
    bound_sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    bound_seeds: int = 10
    enlarged: int = 128  # pixels a side that EfficientNet-Lite0 gets 32 × 32 images at
    held_out: str = "test"  # the part of a data set that classifiers are tested on

    @property
    def seeds(self) -> range:
        return range(self.training.resnet18_seeds)


def small_study(full: Study) -> Study:
    """A smoke run on a CPU, with networks trained for one epoch on sixteen images."""
    return replace(
        full,
        training=small(full.training),
        images=16,
        whole_images=16,
        norm_images=16,
        size=8,
        batch=8,
        other_seeds=1,
        bound_images=16,
        bound_sizes=(4, 8),
        bound_seeds=2,
        enlarged=32,
        held_out="train",  # sixteen images of two parts need not have the same classes
    )


# A network on a data set, as a sketch: what all experiments begin with.


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


# Figures 1, 7 and 8: networks of the same and of different data sets, layer by layer.
#
# A good comparison, says the paper, (1) finds networks of one data set more alike than networks of two, (2) finds
# CIFAR-10 and CIFAR-100 more alike than either and digits, (3) finds CIFAR-10 and digits (ten classes each) more alike
# than CIFAR-100 and digits. Two sketches of the same data share their rows ("shared"), or every network has a
# sketch of its own ("independent"); sketches of different data share no rows either way.


MAIN = ("features", "gradients", "hadamard", "hadamard_of_sketches")  # figure 1, and the paper's own algorithm
OTHERS = ("sum", "maps", "midpoint")  # figures 7 and 8
MEASURES = ("linear_cka", "kernel_alignment", "normalized_bures")  # CKA, CKA as printed (not centred), NBS
TEN, HUNDRED, DIGITS = "cifar10", "cifar100", "mnist"
CHANCE_DRAWS = 2  # of NBS without common rows: they hardly differ
Key = tuple[str, str]


def figure_1(study: Study) -> dict[str, Any]:
    found: dict[str, Any] = {"numbers": {}, "curves": {}}
    for sharing in ("shared", "independent"):
        kept = sketches(study, independent=sharing == "independent")
        for kernel in (*MAIN, *OTHERS):
            seeds = study.seeds if kernel in MAIN else range(study.other_seeds)
            rows = all_pairs(kept, seeds, kernel, sharing == "shared")
            curves = summary(rows)
            found["curves"].setdefault(sharing, {})[kernel] = curves
            for measure in MEASURES:
                held = desiderata(curves[measure])
                found["numbers"] |= {f"{sharing}_{kernel}_{measure}_{what}": n for what, n in held.items()}
            print(f"  {sharing} {kernel}", flush=True)
        del kept
    found["sites"] = SITES[RESNET18]
    return found


def sketches(study: Study, *, independent: bool) -> dict[tuple[str, int], Any]:
    """One for each network; with `independent` each has buckets and signs of its own."""
    found = {}
    for number, (dataset, seed) in enumerate(itertools.product(study.training.datasets, study.seeds)):
        kernels = (*MAIN, *OTHERS) if seed < study.other_seeds else MAIN
        sketch_seed = 1 + number if independent else 0
        found[dataset, seed] = represent(dataset, seed, study, kernels=kernels, sketch_seed=sketch_seed)
    return found


def all_pairs(
    kept: dict[tuple[str, int], Any], seeds: Sequence[int], kernel: str, shared: bool
) -> list[dict[str, Any]]:
    networks = [key for key in kept if key[1] in seeds]
    pairs = list(itertools.combinations(networks, 2)) or [(n, n) for n in networks]
    sites = SITES[RESNET18]

    def factorise(item: Any) -> None:
        _ = kept[item[0]].kernel(item[1], kernel).root

    factorise((networks[0], sites[0]))  # torch loads its linear algebra in one thread, or not at all
    in_threads(factorise, itertools.product(networks, sites))

    def compare(item: Any) -> list[dict[str, Any]]:
        (a, b), site = item
        one, other = (kept[key].at(site) for key in (a, b))
        if shared and a[0] == b[0]:
            c = sosie.compare(one.using(kernel), other.using(kernel), measures=MEASURES)
        else:
            c = sosie.compare_unpaired(one.using(kernel), other.using(kernel), measures=MEASURES, draws=CHANCE_DRAWS)
        named = {"data": tuple(sorted((a[0], b[0]))), "site": site}
        return [{**named, **{key: row[key] for key in ("measure", "value", "null")}} for row in c.rows()]

    return [row for rows in in_threads(compare, itertools.product(pairs, sites)) for row in rows]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each measure, pair of data sets and site: mean and deviation over networks, and what chance gives."""
    groups: dict[tuple[str, Key, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["measure"], row["data"], row["site"]].append(row)
    found: dict[str, Any] = {}
    for (measure, data, site), group in groups.items():
        values, nulls = [r["value"] for r in group], [r["null"] for r in group if r["null"] is not None]
        entry = {"mean": mean(values), "spread": spread(values), "chance": mean(nulls) if nulls else None}
        found.setdefault(measure, {}).setdefault("-".join(data), {})[site] = entry
    return found


def desiderata(curves: dict[str, Any]) -> dict[str, float]:
    """At how many of the sites each of the three holds, and all of them; and how far from chance strangers are."""
    same = [f"{d}-{d}" for d in (TEN, HUNDRED, DIGITS) if f"{d}-{d}" in curves]
    across = {frozenset(pair): "-".join(sorted(pair)) for pair in itertools.combinations((TEN, HUNDRED, DIGITS), 2)}
    natural, ten, hundred = (across[frozenset(p)] for p in ((TEN, HUNDRED), (TEN, DIGITS), (HUNDRED, DIGITS)))
    sites = list(curves[natural])

    def at(pair: str, site: str) -> float:
        return float(curves[pair][site]["mean"])

    first = [min(at(p, s) for p in same) > max(at(p, s) for p in across.values()) if same else False for s in sites]
    second = [at(natural, s) > max(at(ten, s), at(hundred, s)) for s in sites]
    third = [at(ten, s) > at(hundred, s) for s in sites]
    gaps = [curves[p][s]["mean"] - curves[p][s]["chance"] for p in across.values() for s in sites]
    return {
        "first_at": sum(first),
        "second_at": sum(second),
        "third_at": sum(third),
        "all_at": sum(map(all, zip(first, second, third, strict=True))),
        "strangers_above_chance": mean(gaps),
        "strangers_farthest_from_chance": max(map(abs, gaps)),
    }


# Figures 2 and 3: the same networks by Task2Vec and by the Fisher-Rao distance, one number per pair.


def figure_2(study: Study) -> dict[str, Any]:
    """Cosine similarity of the diagonals of the Fisher information, without the heads, whose sizes differ."""
    found = {
        key: task2vec(
            network(*key, study), batches(key[0], study.norm_images, study), leave_out="fc.*", average="filters"
        )
        for key in itertools.product(study.training.datasets, study.seeds)
    }
    rows = by_data({pair: 1 - found[pair[0]].distance(found[pair[1]]) for pair in itertools.combinations(found, 2)})
    within = rows.get("mnist-mnist", rows["cifar10-mnist"])["mean"]
    across = mean([rows[f"{d}-mnist"]["mean"] for d in ("cifar10", "cifar100")])
    return {"numbers": {"digits_within_less_across": within - across}, "similarity": rows}


def figure_3(study: Study) -> dict[str, Any]:
    """|a − b| / √(a b) of two Fisher-Rao norms."""
    found = {
        key: fisher_rao_norm(network(*key, study), batches(key[0], study.norm_images, study), under="labels")
        for key in itertools.product(study.training.datasets, study.seeds)
    }
    rows = by_data({pair: found[pair[0]].distance(found[pair[1]]) for pair in itertools.combinations(found, 2)})
    same = mean([value["mean"] for key, value in rows.items() if len(set(key.split("-"))) == 1] or [0.0])
    return {
        "numbers": {
            "hundred_and_digits": rows["cifar100-mnist"]["mean"],
            "ten_and_hundred": rows["cifar10-cifar100"]["mean"],
            "ten_and_digits": rows["cifar10-mnist"]["mean"],
            "same_data": same,
            "hundred_and_digits_over_same": rows["cifar100-mnist"]["mean"] / same if same else None,
            "ten_from_others_over_hundred_from_digits": (
                min(rows["cifar10-cifar100"]["mean"], rows["cifar10-mnist"]["mean"]) / rows["cifar100-mnist"]["mean"]
            ),
        },
        "norms": {f"{d} {s}": norm.norm for (d, s), norm in found.items()},
        "distance": rows,
    }


def by_data(values: dict[Any, float]) -> dict[str, Any]:
    groups: dict[str, list[float]] = defaultdict(list)
    for (a, b), value in values.items():
        groups["-".join(sorted((a[0], b[0])))].append(value)
    return {key: {"mean": mean(group), "spread": spread(group)} for key, group in groups.items()}


# Figures 5, 9, 10, 11 and 12: every block of one network against every block of another, by CKA.


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
    found = {f"algorithm_1_{key}": value for key, value in numbers_of_maps(maps["algorithm_1"]).items()}
    apart = numbers_of_maps(maps["algorithm_1_independent"])
    found |= {f"algorithm_1_independent_{key}": value for key, value in apart.items()}
    return {"numbers": {**numbers_of_maps(maps["hadamard"]), **found}, "sites": SITES[RESNET18], "maps": maps}


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


def numbers_of_maps(maps: dict[str, Any]) -> dict[str, float]:
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


# Figures 4 and 6: norms of a kernel on data that the network was and was not trained on; 13: of a network of ImageNet.
#
# Each twice: as sosie has them, and by the paper’s algorithm 1, which multiplies the sketched kernels of features and
# of gradients. All on as many images, since two of the three quantities fall with their number.


SCORES = ("mean_embedding", "kernel_norm", "kernel_trace", "mean_over_norm", "mean_over_trace", "log_mean_over_norm")
WAYS = ("ours", "algorithm_1")
NORM_KERNELS = ("hadamard", "features", "gradients")
IMAGENET = "efficientnet_lite0@efficientnet-lite0-imagenet-fp16.safetensors"
Curves = dict[str, dict[str, Any]]  # score -> "source-target" -> one number per site


def figure_4(study: Study) -> dict[str, Any]:
    """Seed by seed, a part for each network and data set: a run that was ended goes on behind the last of them."""
    count = images_of_all(study)
    found: dict[str, dict[str, Curves]] = {way: {} for way in WAYS}
    for architecture, seeds in ((RESNET18, study.seeds), (RESNET50, range(study.training.resnet50_seeds))):
        rows: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
        for seed, source, target in itertools.product(seeds, study.training.datasets, study.training.datasets):
            asked = {"recipe": asdict(study.training.recipe(source, architecture)), "images": count, "size": study.size}
            make = partial(represent, source, seed, study, kernels=NORM_KERNELS, architecture=architecture, on=target)
            name = f"figure-4-{architecture}-{source}-seed{seed}-on-{target}"
            part = remember(study.cache, name, asked, partial(both_ways, partial(make, count=count)))
            for way, score in itertools.product(WAYS, SCORES):
                rows[way, score, f"{source}-{target}"].append(part[way][score])
        for way in WAYS:
            found[way][architecture] = {score: {} for score in SCORES}
        for (way, score, pair), curves in rows.items():
            found[way][architecture][score][pair] = np.mean(curves, 0).tolist()
    theirs = {f"algorithm_1_{key}": value for key, value in numbers_of_norms(found["algorithm_1"]).items()}
    return {
        "numbers": {**numbers_of_norms(found["ours"]), **theirs, **ratios(found["algorithm_1"], found["ours"])},
        "images": count,
        "curves": found["ours"],
        "algorithm_1": found["algorithm_1"],
        "sites": SITES,
    }


def images_of_all(study: Study) -> int:
    """So many images every data set has."""
    return min(available(data, study) for data in study.training.datasets)


def both_ways(make: Callable[[], Any]) -> dict[str, Any]:
    """All scores of a sketch, site by site: sosie's own, and those of the product of two sketches."""
    sketch = make()
    c = sosie.transfer(sketch)
    ours = {score: c.matrix(score)[:, 0].tolist() for score in SCORES}
    return {"sites": list(c.sites_a), "ours": ours, "algorithm_1": algorithm_1(sketch)}


def algorithm_1(sketch: Any) -> dict[str, list[float]]:
    """The scores as the paper computes them, from K̃ = K̃_f ∘ K̃_g, with N the images that were sketched."""
    rows = []
    for site in sketch.side.sites:
        f, g = (sketch.kernel(site, part).raw_gram for part in ("features", "gradients"))
        kernel, n = f * g, sketch.n
        embedding, norm, trace = kernel.sum().sqrt() / n, kernel.norm() / n**2, kernel.trace().sqrt() / n
        over_norm, over_trace = embedding / norm, embedding / trace  # NaN where no gradient reaches the site
        rows.append([float(x) for x in (embedding, norm, trace, over_norm, over_trace, over_norm.log())])
    return dict(zip(SCORES, map(list, zip(*rows, strict=True)), strict=True))


def ratios(theirs: dict[str, Curves], ours: dict[str, Curves]) -> dict[str, float]:
    """How many times too large algorithm 1 has ‖μ‖² and Tr K: the middle of all networks, data sets and sites."""
    found = {}
    for score, name in (("mean_embedding", "mean_square"), ("kernel_trace", "trace")):
        pairs = [
            (np.array(theirs[architecture][score][pair]) / np.array(curves[score][pair])) ** 2
            for architecture, curves in ours.items()
            for pair in curves[score]
        ]
        found[f"algorithm_1_{name}_over_ours"] = float(np.median(np.concatenate(pairs)))
    return found


def numbers_of_norms(found: dict[str, Curves]) -> dict[str, float]:
    """Shares of cases: every source, target and site of both networks, as the paper has both."""
    data, own = (TEN, HUNDRED, DIGITS), [found[architecture] for architecture in (RESNET18, RESNET50)]

    def share(cases: Iterable[bool]) -> float:
        return mean([float(case) for case in cases])

    def of(score: str, *pairs: str) -> list[tuple[float, ...]]:
        """The score of these pairs of data sets, site by site of both networks."""
        return [at for curves in own for at in zip(*(curves[score][pair] for pair in pairs), strict=True)]

    def foreign_above_own(score: str) -> list[bool]:
        return [
            other > same
            for s, t in itertools.permutations(data, 2)
            for other, same in of(score, f"{s}-{t}", f"{s}-{s}")
        ]

    def digits_above(score: str, source: str, other: str) -> float:
        return share(digits > images for digits, images in of(score, f"{source}-{DIGITS}", f"{source}-{other}"))

    def norm(architecture: str, pair: str) -> float:
        return mean(found[architecture]["mean_embedding"][pair])

    highest = [at[2] == max(at) for s in data for at in of("mean_over_trace", *(f"{s}-{t}" for t in data))]
    return {
        "mean_embedding_larger_on_other_data": share(foreign_above_own("mean_embedding")),
        "mean_over_norm_larger_on_own_data": share(not above for above in foreign_above_own("mean_over_norm")),
        **{f"{score}_digits_above_cifar100_for_cifar10": digits_above(score, TEN, HUNDRED) for score in SCORES[:3]},
        **{f"{score}_digits_above_cifar10_for_cifar100": digits_above(score, HUNDRED, TEN) for score in SCORES[:3]},
        "mean_over_trace_highest_for_digits": share(highest),
        "resnet50_over_resnet18": mean([norm(RESNET50, f"{d}-{d}") / norm(RESNET18, f"{d}-{d}") for d in data]),
    }


def figure_13(study: Study) -> dict[str, Any]:
    """The log of Eq. 48 for a network of ImageNet, and for those of CIFAR-100, which stand in for more of them."""
    count = images_of_all(study)
    curves: dict[str, Any] = {way: {"imagenet": {}, "cifar100": {}} for way in WAYS}
    for base, target in itertools.product(("imagenet", "cifar100"), study.training.datasets):
        recipe = asdict(study.training.recipe(HUNDRED, RESNET18)) if base == "cifar100" else IMAGENET
        asked = {"recipe": recipe, "images": count, "size": study.size, "enlarged": study.enlarged}
        make = partial(sketched, base, target, count, study)
        part = remember(study.cache, f"figure-13-{base}-on-{target}", asked, partial(both_ways, make))
        for way in WAYS:
            curves[way][base][target] = {"sites": part["sites"], **part[way]}
    theirs = {f"algorithm_1_{key}": value for key, value in highest(curves["algorithm_1"]).items()}
    return {
        "numbers": {**highest(curves["ours"]), **theirs},
        "images": count,
        "curves": curves["ours"],
        "algorithm_1": curves["algorithm_1"],
    }


def sketched(base: str, target: str, count: int, study: Study) -> Any:
    """One of the two bases on one data set."""
    if base == "cifar100":
        return represent(HUNDRED, 0, study, kernels=NORM_KERNELS, on=target, count=count)
    model, data = imagenet(study), enlarged(target, count, study)
    return sosie.sketch(model, data, size=study.size, kernels=NORM_KERNELS, rows="mean", device=study.device)


def highest(curves: dict[str, dict[str, Any]]) -> dict[str, float]:
    found = {}
    for name, targets in curves.items():
        logs = {target: np.array(scores["log_mean_over_norm"]) for target, scores in targets.items()}
        above = (logs[DIGITS] > logs[TEN]) & (logs[DIGITS] > logs[HUNDRED])
        found[f"{name}_digits_highest"] = float(above.mean())
        late = len(logs[TEN]) * 2 // 3
        found[f"{name}_cifar100_less_cifar10_early"] = float((logs[HUNDRED] - logs[TEN])[:late].mean())
        found[f"{name}_cifar100_less_cifar10_late"] = float((logs[HUNDRED] - logs[TEN])[late:].mean())
    return found


def imagenet(study: Study) -> Any:
    found = open_model(IMAGENET)
    found.model.to(study.device)
    return found


def bases(study: Study) -> list[tuple[str, Any, Any]]:
    """A network of ImageNet and one of CIFAR-100, with their sites."""
    return [("imagenet", imagenet(study), None), ("cifar100", network(HUNDRED, 0, study), SITES[RESNET18])]


def enlarged(dataset: str, count: int, study: Study, split: str = "train") -> Batches:
    """Images at a size that a network of ImageNet can see something at."""
    size = (study.enlarged, study.enlarged)
    found = batches(dataset, count, study, split)
    return [(functional.interpolate(x, size, mode="bilinear", align_corners=False), y) for x, y in found]


# Figure 14: kernel ridge classification from one sketched pass, block by block, against a linear probe.
#
# Networks of ImageNet (EfficientNet-Lite0) and of CIFAR-100 are the base; the tasks are the three data sets.


RIDGE_KERNELS = ("features", "hadamard", "hadamard_of_sketches")


def figure_14(study: Study) -> dict[str, Any]:
    accuracy: dict[str, Any] = {}
    for base, model, sites in bases(study):
        made = enlarged if base == "imagenet" else batches
        rule = "mean" if base == "imagenet" else "flatten"
        for task in study.training.datasets:
            if task == base:
                continue  # its own task is no transfer
            train, test = made(task, study.images, study), made(task, study.norm_images, study, study.held_out)
            options: dict[str, Any] = {"rows": rule, "device": study.device}
            sketch = sosie.sketch(model, train, sites=sites, size=study.size, kernels=RIDGE_KERNELS, **options)
            found: dict[str, Any] = {"sites": list(sketch.side.sites)}
            for kernel in RIDGE_KERNELS:
                reached = classify(sketch, kernel).evaluate(model, test, **options)
                found[kernel] = [reached[site] for site in sketch.side.sites]
            last = sketch.side.sites[-1]
            for name, recipe in (("probe_one_epoch", Recipe(epochs=1, rate=1e-2)), ("probe_converged", None)):
                found[name] = linear_probe(model, train, test, sites=last, recipe=recipe, **options)[last]
            accuracy.setdefault(base, {})[task] = found
            print(f"  {base} on {task}", flush=True)
    return {"numbers": numbers_of_ridge(accuracy), "accuracy": accuracy}


def numbers_of_ridge(accuracy: dict[str, Any]) -> dict[str, float]:
    cases = [found for tasks in accuracy.values() for found in tasks.values()]
    found: dict[str, float] = {}
    for kernel in RIDGE_KERNELS:
        rises = [np.corrcoef(np.arange(len(c[kernel])), c[kernel])[0, 1] for c in cases if np.std(c[kernel]) > 0]
        found[f"{kernel}_rises_with_depth"] = float(np.mean(rises)) if rises else 0.0
        found[f"{kernel}_best"] = mean([max(c[kernel]) for c in cases])
        found[f"{kernel}_last"] = mean([c[kernel][-1] for c in cases])
        found[f"{kernel}_best_less_one_epoch"] = mean([max(c[kernel]) - c["probe_one_epoch"] for c in cases])
        found[f"{kernel}_best_less_converged"] = mean([max(c[kernel]) - c["probe_converged"] for c in cases])
    found["probe_one_epoch"] = mean([c["probe_one_epoch"] for c in cases])
    found["probe_converged"] = mean([c["probe_converged"] for c in cases])
    return found


# Equations 15 and 16: what sketching does to CKA as the sketch grows, on networks of one data set.
#
# For features the exact CKA of all rows is known; so is it for features and gradients together. ε is measured as
# the paper's proof has it: the largest error of an inner product of two columns, relative to their lengths.


BOUND_SITES = ("layer2.1", "layer4.1", "avgpool")
BOUND_KERNELS = ("features", "hadamard", "hadamard_of_sketches")
BOUND_MEASURES = ("linear_cka", "debiased_cka")


def bounds(study: Study) -> dict[str, Any]:
    networks = (("cifar10", 0), ("cifar10", min(1, max(study.seeds))))
    options: dict[str, Any] = {"count": study.bound_images, "sites": BOUND_SITES}
    exact = [represent(*key, study, kernels=BOUND_KERNELS, size=None, **options) for key in networks]
    truth = {
        (kernel, m): values_at(exact, kernel, m)
        for kernel, m in itertools.product(("features", "hadamard"), BOUND_MEASURES)
    }
    rows = []
    for size in study.bound_sizes:
        found: dict[tuple[str, str, str], list[float]] = {}
        held: dict[str, list[bool]] = {"15": [], "16": [], "39": []}
        for seed in range(study.bound_seeds):
            pair = [
                represent(*key, study, kernels=BOUND_KERNELS, size=size, sketch_seed=seed, **options)
                for key in networks
            ]
            for kernel, measure in itertools.product(BOUND_KERNELS, BOUND_MEASURES):
                if (kernel, measure) != ("hadamard_of_sketches", "debiased_cka"):
                    for site, value in values_at(pair, kernel, measure).items():
                        found.setdefault((kernel, measure, site), []).append(value)
            for equation, ok in equations(exact, pair, truth["features", "linear_cka"]["avgpool"]).items():
                held[equation].append(ok)
        for (kernel, measure, site), drawn in found.items():
            true = truth["hadamard" if kernel != "features" else kernel, measure][site]
            drawn = [value for value in drawn if value == value]  # no value where noise outweighs the kernel
            rows.append(
                {
                    "size": size,
                    "kernel": kernel,
                    "measure": measure,
                    "site": site,
                    "exact": true,
                    "bias": mean(drawn) - true if drawn else None,
                    "spread": spread(drawn) if drawn else None,
                    "undefined": study.bound_seeds - len(drawn),
                    **{f"equation_{key}_held": mean(list(map(float, oks))) for key, oks in held.items()},
                }
            )
        print(f"  size {size}", flush=True)
    return {"numbers": numbers_of_bounds(rows, study), "rows": rows}


def values_at(pair: list[Any], kernel: str, measure: str) -> dict[str, float]:
    c = sosie.compare(*(k.using(kernel) for k in pair), measures=measure)
    matrix = c.matrix(measure)
    return {site: float(matrix[i, i]) for i, site in enumerate(c.sites_a)}


def equations(exact: list[Any], pair: list[Any], cka: float) -> dict[str, bool]:
    """Whether Eq. 15, 16 and 39 hold for centred features at the pooled output, with the ε that was measured."""
    x, y = (sketch.kernel("avgpool", "features").rows for sketch in exact)
    u, v = (sketch.kernel("avgpool", "features").rows for sketch in pair)
    lengths = x.norm(dim=0)[:, None] * y.norm(dim=0)
    epsilon = float(((u.T @ v - x.T @ y).abs() / torch.where(lengths > 0, lengths, torch.inf)).max())
    whole, sketched = float((x.T @ y).norm()), float((u.T @ v).norm())
    added = (epsilon**2 + 2 * epsilon) * float(x.norm() ** 2 * y.norm() ** 2)
    scka = sketched**2 / float((u.T @ u).norm() * (v.T @ v).norm())
    limit = 4 * epsilon / (1 - epsilon) ** 2 * cka if epsilon < 1 else float("inf")
    return {
        "15": abs(sketched - whole) <= epsilon * whole,
        "16": abs(scka - cka) <= limit,
        "39": abs(sketched**2 - whole**2) <= added * (1 + 1e-9),
    }


def numbers_of_bounds(rows: list[dict[str, Any]], study: Study) -> dict[str, float | None]:
    at = study.size if study.size in study.bound_sizes else study.bound_sizes[-1]
    found: dict[str, float | None] = {}
    for kernel, measure in itertools.product(BOUND_KERNELS, BOUND_MEASURES):
        biases = [abs(r["bias"]) for r in rows if (r["size"], r["kernel"], r["measure"]) == (at, kernel, measure)
                  and r["bias"] is not None]  # fmt: skip
        found[f"{kernel}_{measure}_largest_bias"] = max(biases, default=None)  # none where no value was defined
    for equation in ("15", "16", "39"):
        found[f"equation_{equation}_held"] = min(r[f"equation_{equation}_held"] for r in rows)
    return found


EXPERIMENTS = {
    "figure-1": figure_1,  # 7 and 8 too
    "figure-2": figure_2,
    "figure-3": figure_3,
    "figure-4": figure_4,  # 6 too
    "figure-5": figure_5,  # 9 and 10 too
    "figure-11": figure_11,  # 12 too
    "figure-13": figure_13,
    "figure-14": figure_14,
    "bounds": bounds,
}

if __name__ == "__main__":
    running.start(PAPER, EXPERIMENTS, Study, small_study)
