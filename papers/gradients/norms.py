"""Figures 4 and 6: norms of a kernel on data that the network was and was not trained on; 13: of a network of ImageNet.

All on as many images, since two of the three quantities fall with their number.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
from represent import SITES, Batches, batches, mean, network
from settings import RESNET18, RESNET50, Study
from torch.nn import functional

import sosie
from sosie.models import open_model

TEN, HUNDRED, DIGITS = "cifar10", "cifar100", "mnist"
SCORES = ("mean_embedding", "kernel_norm", "kernel_trace", "mean_over_norm", "mean_over_trace", "log_mean_over_norm")
IMAGENET = "efficientnet_lite0@efficientnet-lite0-imagenet-fp16.safetensors"
Curves = dict[str, dict[str, Any]]  # score -> "source-target" -> a number a site


def figure_4(study: Study) -> dict[str, Any]:
    found: dict[str, Curves] = {}
    for architecture, seeds in ((RESNET18, study.seeds), (RESNET50, range(study.training.resnet50_seeds))):
        curves: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for source, target, seed in itertools.product(study.training.datasets, study.training.datasets, seeds):
            c = sosie.transfer(
                network(source, seed, study, architecture),
                batches(target, study.norm_images, study),
                sites=SITES[architecture],
                size=study.size,
            )
            for score in SCORES:
                curves[score][f"{source}-{target}"].append(c.matrix(score)[:, 0])
        found[architecture] = {
            score: {pair: np.mean(rows, 0).tolist() for pair, rows in pairs.items()} for score, pairs in curves.items()
        }
        print(f"  {architecture}", flush=True)
    return {"numbers": numbers(found), "curves": found, "sites": SITES}


def numbers(found: dict[str, Curves]) -> dict[str, float]:
    flat, deep = found[RESNET18], found[RESNET50]

    def share(score: str, holds: Any) -> float:
        """Of all source networks, other data sets and sites."""
        data = (TEN, HUNDRED, DIGITS)
        cases = [
            holds(flat[score][f"{s}-{t}"][k], flat[score][f"{s}-{s}"][k])
            for s, t in itertools.permutations(data, 2)
            for k in range(len(SITES[RESNET18]))
        ]
        return mean([float(case) for case in cases])

    def digits_above(score: str, source: str, other: str) -> float:
        return mean(
            [
                float(a > b)
                for a, b in zip(flat[score][f"{source}-{DIGITS}"], flat[score][f"{source}-{other}"], strict=True)
            ]
        )

    highest = [
        flat["mean_over_trace"][f"{s}-{DIGITS}"][k]
        == max(flat["mean_over_trace"][f"{s}-{t}"][k] for t in (TEN, HUNDRED, DIGITS))
        for s in (TEN, HUNDRED, DIGITS)
        for k in range(len(SITES[RESNET18]))
    ]
    own = [flat["mean_embedding"][f"{d}-{d}"] for d in (TEN, HUNDRED, DIGITS)]
    deeper = [deep["mean_embedding"][f"{d}-{d}"] for d in (TEN, HUNDRED, DIGITS)]
    return {
        "mean_embedding_larger_on_other_data": share("mean_embedding", lambda other, own: other > own),
        "mean_over_norm_larger_on_own_data": share("mean_over_norm", lambda other, own: own > other),
        **{f"{score}_digits_above_cifar100_for_cifar10": digits_above(score, TEN, HUNDRED) for score in SCORES[:3]},
        **{f"{score}_digits_above_cifar10_for_cifar100": digits_above(score, HUNDRED, TEN) for score in SCORES[:3]},
        "mean_over_trace_highest_for_digits": mean([float(h) for h in highest]),
        "resnet50_over_resnet18": mean([mean(d) / mean(s) for d, s in zip(deeper, own, strict=True)]),
    }


def figure_13(study: Study) -> dict[str, Any]:
    """The log of Eq. 48 for a network of ImageNet, and for those of CIFAR-100, which stand in for more of them."""
    curves: dict[str, dict[str, Any]] = {}
    for name, model, sites in bases(study):
        for target in study.training.datasets:
            data = (
                enlarged(target, study.norm_images, study)
                if name == "imagenet"
                else batches(target, study.norm_images, study)
            )
            rows = "mean" if name == "imagenet" else "flatten"
            c = sosie.transfer(model, data, sites=sites, size=study.size, rows=rows, device=study.device)
            scores = {score: c.matrix(score)[:, 0].tolist() for score in SCORES}
            curves.setdefault(name, {})[target] = {"sites": c.sites_a, **scores}
    found = {}
    for name, targets in curves.items():
        logs = {target: np.array(scores["log_mean_over_norm"]) for target, scores in targets.items()}
        above = (logs[DIGITS] > logs[TEN]) & (logs[DIGITS] > logs[HUNDRED])
        found[f"{name}_digits_highest"] = float(above.mean())
        late = len(logs[TEN]) * 2 // 3
        found[f"{name}_cifar100_less_cifar10_early"] = float((logs[HUNDRED] - logs[TEN])[:late].mean())
        found[f"{name}_cifar100_less_cifar10_late"] = float((logs[HUNDRED] - logs[TEN])[late:].mean())
    return {"numbers": found, "curves": curves}


def bases(study: Study) -> list[tuple[str, Any, Any]]:
    """A network of ImageNet and one of CIFAR-100, with their sites."""
    imagenet = open_model(IMAGENET)
    imagenet.model.to(study.device)
    return [("imagenet", imagenet, None), ("cifar100", network(HUNDRED, 0, study), SITES[RESNET18])]


def enlarged(dataset: str, count: int, study: Study, split: str = "train") -> Batches:
    """Images at a size that a network of ImageNet can see something at."""
    size = (study.enlarged, study.enlarged)
    found = batches(dataset, count, study, split)
    return [(functional.interpolate(x, size, mode="bilinear", align_corners=False), y) for x, y in found]
