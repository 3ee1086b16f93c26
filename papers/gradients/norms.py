"""Figures 4 and 6: norms of a kernel on data that the network was and was not trained on; 13: of a network of ImageNet.

Each twice: as sosie has them, and by the paper's algorithm 1, which multiplies the sketched kernels of features and of
gradients. All on as many images, since two of the three quantities fall with their number.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from represent import SITES, Batches, available, batches, mean, network, represent
from running import remember
from settings import RESNET18, RESNET50, Study
from torch.nn import functional

import sosie
from sosie.models import open_model

TEN, HUNDRED, DIGITS = "cifar10", "cifar100", "mnist"
SCORES = ("mean_embedding", "kernel_norm", "kernel_trace", "mean_over_norm", "mean_over_trace", "log_mean_over_norm")
WAYS = ("ours", "algorithm_1")
KERNELS = ("hadamard", "features", "gradients")
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
            make = partial(represent, source, seed, study, kernels=KERNELS, architecture=architecture, on=target)
            name = f"figure-4-{architecture}-{source}-seed{seed}-on-{target}"
            part = remember(study.cache, name, asked, partial(both_ways, partial(make, count=count)))
            for way, score in itertools.product(WAYS, SCORES):
                rows[way, score, f"{source}-{target}"].append(part[way][score])
        for way in WAYS:
            found[way][architecture] = {score: {} for score in SCORES}
        for (way, score, pair), curves in rows.items():
            found[way][architecture][score][pair] = np.mean(curves, 0).tolist()
    theirs = {f"algorithm_1_{key}": value for key, value in numbers(found["algorithm_1"]).items()}
    return {
        "numbers": {**numbers(found["ours"]), **theirs, **ratios(found["algorithm_1"], found["ours"])},
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


def numbers(found: dict[str, Curves]) -> dict[str, float]:
    """Shares of cases: every source, target and site of both networks, as the paper has both."""
    data, own = (TEN, HUNDRED, DIGITS), [found[architecture] for architecture in (RESNET18, RESNET50)]

    def share(cases: Iterable[bool]) -> float:
        return mean([float(case) for case in cases])

    def of(score: str, *pairs: str) -> list[tuple[float, ...]]:
        """The score of these pairs of data sets, site by site of both networks."""
        return [at for curves in own for at in zip(*(curves[score][pair] for pair in pairs), strict=True)]

    def foreign_above_own(score: str) -> list[bool]:
        return [other > same for s, t in itertools.permutations(data, 2) for other, same in of(score, f"{s}-{t}", f"{s}-{s}")]

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
        return represent(HUNDRED, 0, study, kernels=KERNELS, on=target, count=count)
    model, data = imagenet(study), enlarged(target, count, study)
    return sosie.sketch(model, data, size=study.size, kernels=KERNELS, rows="mean", device=study.device)


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
