"""Figures 1 to 3: with a stronger penalty, are layers less alike and weights closer to 0?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from settings import CKA_SR, NONE, Arm, Settings, sampled
from tables import Numbers, accuracies, arranged, chosen, epsilon_of, maps, mean, pretrained, trained
from training import Job, Record, train

Levels = Mapping[float, Mapping[int, Record]]  # weight of the penalty → seed → network


def figure_1(settings: Settings) -> dict[str, Any]:
    """ResNet-56, one seed each weight."""
    arms = (NONE, *(sampled(None, 1, weight) for weight in settings.figure_1_weights))
    jobs = [
        Job("cifar10", settings.deep, settings.figure_1, 0, arm, settings.sparsity, settings.options) for arm in arms
    ]
    return described(levels(arms, arranged(jobs, train(settings, jobs))))


def figure_2(settings: Settings) -> dict[str, Any]:
    """ResNet-20: the networks of tables 2 and 3 whose penalty sees all rows of every batch."""
    arms = (NONE, *(sampled(None, 1, weight) for weight in settings.weights))
    return described(levels(arms, trained(settings, arms, settings.table_2_seeds)))


def figure_3(settings: Settings) -> dict[str, Any]:
    """Weights of the networks of table 4, which are whole [of ImageNet]."""
    numbers: Numbers = {}
    found: dict[str, Any] = {}
    for place, network in zip(("smaller", "larger"), settings.table_4_networks, strict=True):
        found[place] = described(levels((NONE, CKA_SR), pretrained(settings, network))) | {"network": network}
        numbers |= {f"{place}_{key}": value for key, value in found[place].pop("numbers").items()}
    return {"numbers": numbers, "networks": found}


def levels(arms: Sequence[Arm], by_arm: Mapping[str, Mapping[int, Record]]) -> Levels:
    return {arm.weight: by_arm[arm.name] for arm in arms}


def described(by_weight: Levels) -> dict[str, Any]:
    """At each weight how alike layers are, and ε-sparsity, of all weights, of the kept ones, and relative to layers."""
    rows: dict[str, list[float | None]] = {
        kind: [mean(chosen(r, lambda one, kind=kind: one["after"][kind])) for r in by_weight.values()]
        for kind in ("biased", "debiased", "all_pairs")
    }
    rows |= {
        f"epsilon_{kind}": [mean(chosen(r, lambda one, kind=kind: epsilon_of(one, kind))) for r in by_weight.values()]
        for kind in ("all", "kept", "relative")
    }
    rows["rms"] = [mean(chosen(r, lambda one: one["weights"]["rms"])) for r in by_weight.values()]
    rows["accuracy"] = [mean(accuracies(r)) for r in by_weight.values()]
    rows["nats"] = [mean(chosen(r, lambda one: one.get("information", {}).get("nats"))) for r in by_weight.values()]
    rows["finite"] = [mean(chosen(r, finite)) for r in by_weight.values()]
    numbers: Numbers = {f"{kind}_{k}": value for kind, values in rows.items() for k, value in enumerate(values)}
    for kind, values in rows.items():
        known = [value for value in values if value is not None]
        steps = [b - a for a, b in pairwise(known)]
        whole = len(known) == len(values)
        numbers |= {
            f"{kind}_rise": known[-1] - known[0] if whole else None,
            f"{kind}_lowest_step": min(steps) if whole else None,
            f"{kind}_highest_step": max(steps) if whole else None,
        }
    by_name = {f"{weight:g}": dict(records) for weight, records in by_weight.items()}
    points = {name: [r["information"]["points"] for r in records.values() if "information" in r][:1]
              for name, records in by_name.items()}  # fmt: skip
    return {"numbers": numbers, "weights": list(by_weight), "rows": rows, "maps": maps(by_name), "information": points}


def finite(record: Record) -> float | None:
    """Share of pairs of layers whose information is finite."""
    found = record.get("information")
    return found["finite"] / found["pairs"] if found else None
