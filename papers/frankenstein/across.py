"""Stitching across data sets and architectures, and what a network that never learnt anything gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from joining import join, mean
from networks import accuracy_of, akamaster, resnet20, tiny10, trained, untrained
from settings import Settings

from sosie.models import NamedModel

DEPTHS = (("layer1.2", "layer1.8"), ("layer2.2", "layer2.8"), ("layer3.2", "layer3.8"))  # last blocks of 20, of 56
TOKENS = (("layer1.2", "blocks.0"), ("layer2.2", "blocks.2"), ("layer3.1", "blocks.4"))
RESNET = "resnet20(shortcut='B', normalise='cifar', seed=2)"
RESNET_100 = "resnet20(classes=100, shortcut='B', normalise='cifar', seed=2)"
VIT = "vit(normalise='cifar', seed=0)"


def data_sets(settings: Settings) -> dict[str, Any]:
    """A learnt other images, B CIFAR-10; the joint is found and tested on CIFAR-10."""
    b = resnet20(1, settings)
    lower = {
        "cifar10": resnet20(0, settings),
        "cifar100": trained(RESNET_100, "cifar100", 2, settings),
        "fashion-mnist": trained(RESNET, "fashion-mnist", 2, settings),
        "untrained": untrained(RESNET, settings),
    }
    pairs = tuple((site, site) for site in settings.across_sites)
    curves = {name: curve(a, b, pairs, settings) for name, a in lower.items()}
    own = {name: accuracy_of(lower[name], name, settings) for name in ("cifar10", "cifar100", "fashion-mnist")}
    numbers = {f"from_{name}": mean([row["relative_accuracy"] for row in rows]) for name, rows in curves.items()}
    numbers["cifar100_drop"] = numbers["from_cifar10"] - numbers["from_cifar100"]
    numbers["cifar100_above_untrained"] = numbers["from_cifar100"] - numbers["from_untrained"]
    return {"numbers": numbers, "accuracies": own, "curves": curves}


def architectures(settings: Settings) -> dict[str, Any]:
    """ResNet-20 and ResNet-56 both ways; ResNet-20 and a small vision transformer both ways."""
    small, deep = akamaster(20, settings), akamaster(56, settings)
    transformer = trained(VIT, "cifar10", 0, settings)
    depths, tokens = DEPTHS[-settings.across_pairs :], TOKENS[-settings.across_pairs :]
    curves = {
        "resnet20_to_resnet56": curve(small, deep, depths, settings),
        "resnet56_to_resnet20": curve(deep, small, [pair[::-1] for pair in depths], settings),
        "resnet20_to_vit": curve(small, transformer, tokens, settings),
        "vit_to_resnet20": curve(transformer, small, [pair[::-1] for pair in tokens], settings),
    }
    numbers = {name: mean([row["relative_accuracy"] for row in rows]) for name, rows in curves.items()}
    return {"numbers": numbers, "vit_accuracy": accuracy_of(transformer, "cifar10", settings), "curves": curves}


def control(settings: Settings) -> dict[str, Any]:
    """The control that the paper lacks: random networks, below the joint and above it.

    Random below: can B's upper part and the joint do the job with any features at all? Random above: can the joint
    alone make an untrained upper part do the job? There B's answers mean nothing, so the joint learns the labels and
    its accuracy is compared with A's.
    """
    a, b, random = tiny10(0, settings), tiny10(1, settings), untrained("tiny10(normalise='cifar', seed=3)", settings)
    pairs = tuple((site, site) for site in settings.tiny_sites)
    curves = {
        "trained_to_trained": curve(a, b, pairs, settings),
        "random_to_trained": curve(random, b, pairs, settings),
        "trained_to_random": curve(a, random, pairs, settings, targets="labels"),
    }
    means = {name: mean([row["relative_accuracy"] for row in rows]) for name, rows in curves.items()}
    above = [row["accuracy"] / row["accuracy_a"] for row in curves["trained_to_random"]]
    first = {name: rows[0]["relative_accuracy"] for name, rows in curves.items()}
    return {
        "numbers": {
            "trained_above_random_below": means["trained_to_trained"] - means["random_to_trained"],
            "trained_above_random_below_first_layer": first["trained_to_trained"] - first["random_to_trained"],
            "random_to_trained": means["random_to_trained"],
            "random_to_trained_first_layer": first["random_to_trained"],
            "trained_to_random_over_a": mean(above),
            "trained_to_random_over_a_highest": max(above),
        },
        "curves": curves,
    }


def curve(
    a: NamedModel, b: NamedModel, pairs: Sequence[tuple[str, str]], settings: Settings, **options: object
) -> list[dict[str, Any]]:
    """Task-loss matching at pairs of sites; what least squares gives beside it."""
    rows = []
    for site_a, site_b in pairs:
        direct, task = join(a, site_a, b, site_b, ["least_squares", settings.task(**options)], settings)
        beside = {f"least_squares_{key}": direct.get(key) for key in ("relative_accuracy", "accuracy")}
        rows.append({"site_a": site_a, "site_b": site_b, **task, **beside, "history": []})
    return rows
