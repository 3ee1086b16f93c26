"""CKA-SR, similarity between layers as a penalty for sparse training: the appendix's tables and figures, run again.

    python papers/ckasr/run.py                              # all of it, on a GPU
    python papers/ckasr/run.py --only table-5,table-3 --resume
    python papers/ckasr/run.py --records                    # table-5-full of the seeds that were run
    python papers/ckasr/run.py --small                      # a smoke run on a CPU: its numbers mean nothing
    python papers/ckasr/draw.py                             # the figures, from results/*.json

An experiment writes its results when it is done, and a record of each network as soon as it is trained (nets/, or the
folder SOSIE_CHECKPOINTS): a run that was ended goes on where it was, and experiments share networks. SOSIE_DATA names
the folders with the images (README.md says which).
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import running
from differences import Values, compare_arms, difference
from lemmas import lemmas
from networks import (
    AUGMENTED,
    CCA,
    CKA_SR,
    NONE,
    Arm,
    Job,
    Recipe,
    Record,
    fit_dynamic,
    fit_models,
    penalty_of,
    probes,
    sampled,
    similarity,
    step_seconds,
    tested,
    train,
)

# How much of everything: the real run, and a smoke run. What the paper has instead is in [brackets].


@dataclass(frozen=True)
class Tokens:
    """Table 1, scaled down [DeiT-Tiny on ImageNet]: a small vision transformer, and the same with tokens dropped."""

    dataset: str = "cifar10"
    depth: int = 6
    width: int = 192
    patch: int = 4
    keeps: tuple[float, ...] = (0.7, 0.9)
    first: Recipe = Recipe(epochs=30, warmup=2, batch=512, rate=1e-3, decay=0.05, optimiser="adam")
    then: Recipe = Recipe(epochs=8, batch=512, rate=2e-4, decay=0.05, optimiser="adam")
    gamma: float = 0.5  # of token CKA in the score [1, and a sum over tokens instead of a mean]
    calibration: int = 256  # training images that token CKA is measured on
    ratio_weight: float = 2.0  # of the term that holds the share of tokens kept (Rao et al. 2021)


@dataclass(frozen=True)
class Settings:
    """The real run."""

    device: str
    results: Path
    cache: Path  # what is known of every network that was trained: experiments share them
    synthetic: bool = False  # random images: no data are needed
    at_once: int = 10  # networks trained side by side
    mixed: bool = True
    probes: int = 1000  # test images that layers are compared on, in evaluation mode
    few: int = 128  # as many as a batch has: what the penalty itself sees
    map_seeds: tuple[int, ...] = (0,)  # whose layers are all compared with each other
    information_seeds: tuple[int, ...] = (0, 1, 2)
    epsilons: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    relative_epsilon: float = 0.1  # in root mean squares of a layer's kept weights
    bins: int = 81
    limit: float = 0.2  # weights of histograms lie within ± this

    network: str = "resnet20"
    width: float = 1.0
    dense: Recipe = Recipe(epochs=60)
    dense_seeds: tuple[int, ...] = tuple(range(10))
    table_5: Recipe = Recipe(epochs=12)
    table_5_sparsities: tuple[float, ...] = (0.95, 0.98)
    table_5_seeds: tuple[int, ...] = tuple(range(10))  # [one]
    table_5_rest: tuple[float, ...] = (0.70, 0.85, 0.90, 0.998)  # the first seed alone
    table_5_longer: Recipe = Recipe(epochs=24)  # the first sparsity again
    table_5_full: Recipe = Recipe(epochs=160, schedule="steps")  # and as the code that the paper builds on trains
    sparse: Recipe = Recipe(epochs=12)  # tables 2 and 3, figure 2: CIFAR-10
    sparsity: float = 0.95
    table_3_seeds: tuple[int, ...] = tuple(range(5))  # [one]
    full_seeds: tuple[int, ...] = tuple(range(10))  # of table 3 by table 5's longest training
    table_2_seeds: tuple[int, ...] = (0, 1, 2)  # [one]; the baseline is table 3's
    weights: tuple[float, ...] = (1e-4, 8e-4, 1e-2)  # [1e-5 to 1e-2, twelve]
    samples: tuple[tuple[int | None, int], ...] = ((None, 1), (8, 5), (8, 10))  # rows, every
    table_4_networks: tuple[str, ...] = ("resnet18", "resnet50")
    table_4_options: tuple[tuple[str, Any], ...] = (("stem", "cifar"),)
    table_4: Recipe = Recipe(epochs=12, warmup=2)  # [and ImageNet]
    deep: str = "resnet56"
    figure_1: Recipe = Recipe(epochs=16)
    figure_1_weights: tuple[float, ...] = (8e-4, 1e-2)  # and none
    figure_1_seeds: tuple[int, ...] = (0, 1, 2)  # [one]
    tokens: Tokens = field(default_factory=Tokens)

    tokens_of_paper: int = 196  # lemmas: of a ViT with patches of 16 pixels
    draws: int = 20_000  # lemmas: rows of Gaussian samples

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """Of CIFAR's residual networks."""
        return (("width", self.width),)


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    tiny = Recipe(epochs=1, batch=12, images=24)
    by_adam = replace(tiny, rate=1e-3, optimiser="adam", decay=0.05)
    return replace(
        full,
        synthetic=True,
        mixed=False,
        probes=24,
        few=12,
        network="resnet8",
        width=0.125,
        dense=tiny,
        dense_seeds=(0, 1),
        table_5=tiny,
        table_5_sparsities=(0.5, 0.6),
        table_5_seeds=(0, 1),
        table_5_rest=(0.2, 0.3, 0.4, 0.7),
        table_5_longer=tiny,  # the networks of table 5
        table_5_full=replace(tiny, schedule="steps"),
        sparse=tiny,
        sparsity=0.5,
        table_3_seeds=(0, 1),
        full_seeds=(0, 1),
        table_2_seeds=(0, 1),
        figure_1_seeds=(0, 1),
        samples=((None, 1), (4, 1), (4, 2)),
        table_4_networks=("resnet8", "resnet14"),
        table_4_options=(("width", 0.125),),
        table_4=tiny,
        deep="resnet14",
        figure_1=tiny,
        tokens=Tokens(depth=3, width=24, patch=8, first=by_adam, then=by_adam),
        tokens_of_paper=16,
        draws=2000,
    )


# Tables 2 to 5 and the dense networks: what a penalty does to accuracy, and to what it penalises.


Numbers = dict[str, float | None]
ByArm = dict[str, dict[int, Record]]


def dense(settings: Settings) -> dict[str, Any]:
    """Ten networks whole: whether the training that all of this rests on is any good."""
    jobs = [
        Job("cifar10", settings.network, settings.dense, seed, options=settings.options)
        for seed in settings.dense_seeds
    ]
    records = train(settings, jobs)
    found = compare_arms({"none": accuracies({job.seed: records[job] for job in jobs})}, "none")["arms"]["none"]
    each = found["seeds"].values()
    numbers = {
        "lowest": min(each, default=None),
        "mean": found["mean"],
        "sd": found["sd"],
        "minutes": sum(records[job]["seconds"] for job in jobs) / 60,
    }
    return {
        "numbers": numbers,
        "accuracies": found["seeds"],
        "maps": maps({"none": {j.seed: records[j] for j in jobs}}),
    }


def table_5(settings: Settings) -> dict[str, Any]:
    """CIFAR-100, none / CKA-SR / AugCKA-SR at two sparsities, ten seeds."""
    levels = dict(zip(("main", "high"), settings.table_5_sparsities, strict=True))
    return _table_5(settings, settings.table_5, levels, settings.table_5_seeds)


def table_5_rest(settings: Settings) -> dict[str, Any]:
    """The other sparsities, one seed."""
    levels = {f"level_{k}": sparsity for k, sparsity in enumerate(settings.table_5_rest)}
    return _table_5(settings, settings.table_5, levels, settings.table_5_seeds[:1])


def table_5_longer(settings: Settings) -> dict[str, Any]:
    """The first sparsity with twice the epochs: do gains wait for a longer training?"""
    return _table_5(
        settings, settings.table_5_longer, {"longer": settings.table_5_sparsities[0]}, settings.table_5_seeds
    )


def table_5_full(settings: Settings) -> dict[str, Any]:
    """The first sparsity with the 160 epochs of the code that the paper builds on."""
    return _table_5(settings, settings.table_5_full, {"full": settings.table_5_sparsities[0]}, settings.table_5_seeds)


def _table_5(settings: Settings, recipe: Recipe, levels: Mapping[str, float], seeds: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    numbers: Numbers = {}
    arms = (NONE, CKA_SR, AUGMENTED)
    every = {level: jobs_of(settings, "cifar100", recipe, arms, seeds, sparsity) for level, sparsity in levels.items()}
    records = train(settings, [job for jobs in every.values() for job in jobs])
    for level, jobs in every.items():
        by_arm = arranged(jobs, records)
        found[level] = {"sparsity": levels[level], **described(by_arm)}
        numbers |= {f"{level}_{key}": value for key, value in flat(found[level]).items()}
        both = compared(by_arm, "cka_sr", "augcka_sr")
        found[level]["augmented_over_cka_sr"] = both
        numbers |= {f"{level}_augcka_sr_over_cka_sr": both["difference"], f"{level}_augcka_sr_over_low": both["low"]}
    ahead = [numbers[f"{level}_augcka_sr_over_cka_sr"] for level in found]
    numbers["augcka_sr_ahead"] = sum(value is not None and value > 0 for value in ahead)
    return {"numbers": numbers, "levels": found}


def table_3(settings: Settings) -> dict[str, Any]:
    """CIFAR-10: none / CCA / CKA-SR, five seeds."""
    by_arm = trained(settings, (NONE, CCA, CKA_SR), settings.table_3_seeds)
    found = described(by_arm)
    ahead = compared(by_arm, "cca", "cka_sr")
    spread = {name: found["accuracy"]["arms"][name]["sd"] for name in ("cca", "cka_sr")}
    numbers = flat(found) | {
        "cka_sr_over_cca": ahead["difference"],
        "cka_sr_over_cca_low": ahead["low"],
        "cca_spread": spread["cca"] / spread["cka_sr"] if spread["cca"] and spread["cka_sr"] else None,
        "cca_diverged": sum(record["diverged"] for record in by_arm["cca"].values()),
    }
    return {"numbers": numbers, **found, "cka_sr_over_cca": ahead}


def table_3_full(settings: Settings) -> dict[str, Any]:
    """The same with 160 epochs and ten seeds."""
    return table_3(replace(settings, sparse=settings.table_5_full, table_3_seeds=settings.full_seeds))


def table_2(settings: Settings) -> dict[str, Any]:
    """CIFAR-10: how many rows, how often, how strong; three seeds, and table 3's baseline."""
    arms = {(rows, every, weight): sampled(rows, every, weight)
            for rows, every in settings.samples for weight in settings.weights}  # fmt: skip
    by_arm = trained(settings, (NONE, *arms.values()), settings.table_2_seeds)
    found = described(by_arm)
    differences = found["accuracy"]["differences"]
    names = dict(zip(settings.samples, ("all", "eight_5", "eight_10"), strict=True))
    levels = dict(zip(settings.weights, ("weak", "paper", "strong"), strict=True))
    numbers: Numbers = {}
    for (rows, every, weight), arm in arms.items():
        cell, place = differences[arm.name], f"{names[rows, every]}_{levels[weight]}"
        numbers |= {f"{place}_gain": cell["difference"], f"{place}_low": cell["low"], f"{place}_p": cell["p_holm"]}
        numbers[f"{place}_fall"] = found["fall"]["debiased"][arm.name]["difference"]
    cells = [cell for cell in differences.values() if cell["difference"] is not None]
    numbers["cells_above"] = sum(cell["difference"] > 0 for cell in cells)
    numbers["cells_proven"] = sum(cell["difference"] > 0 and (cell["p_holm"] or 1) < 0.05 for cell in cells)
    detectable = [cell["detectable"] for cell in cells if cell["detectable"] is not None]
    numbers["detectable"] = max(detectable, default=None)
    full, few = (sampled(rows, every, CKA_SR.weight).name for rows, every in settings.samples[:2])
    numbers["all_over_eight"] = compared(by_arm, few, full)["difference"]
    seconds = step_seconds(settings, [NONE, *(sampled(*sample, CKA_SR.weight) for sample in settings.samples)])
    for sample, name in names.items():
        numbers[f"{name}_cost"] = seconds[sampled(*sample, CKA_SR.weight).name] / seconds["none"]
    added = [numbers[f"{name}_cost"] or 0 for name in ("all", "eight_5")]
    numbers["added_share"] = (added[1] - 1) / (added[0] - 1) if added[0] > 1 else None
    cells_of = {arm.name: dict(zip(("rows", "every", "weight"), cell, strict=True)) for cell, arm in arms.items()}
    return {"numbers": numbers, **found, "cells": cells_of, "step_seconds": seconds}


def cost_of_penalty(settings: Settings) -> dict[str, Any]:
    """Operations of CKA-SR itself in a step of training, the network's own left out."""
    x = torch.rand(settings.table_5.batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found: dict[str, float] = {}
    for rows, every in settings.samples:
        arm = sampled(rows, every, CKA_SR.weight)
        model = Job("cifar10", settings.network, settings.sparse, 0, arm, options=settings.options).build("cpu")
        penalty = penalty_of(model, replace(arm, every=1))
        assert penalty is not None
        with FlopCounterMode(display=False) as alone:
            model(x)
        with penalty, FlopCounterMode(display=False) as both:
            model(x)
            penalty()
        found[arm.name] = (both.get_total_flops() - alone.get_total_flops()) / every
    whole, few = (found[sampled(rows, every, CKA_SR.weight).name] for rows, every in settings.samples[:2])
    return {"numbers": {"few_over_all": few / whole}, "operations_a_step": found}


def table_4(settings: Settings) -> dict[str, Any]:
    """CIFAR-100: larger networks whole, with and without, one seed."""
    numbers: Numbers = {}
    found: dict[str, Any] = {}
    for place, network in zip(("smaller", "larger"), settings.table_4_networks, strict=True):
        by_arm = pretrained(settings, network)
        found[place] = {"network": network, **described(by_arm)}
        numbers |= {f"{place}_{key}": value for key, value in flat(found[place]).items()}
    return {"numbers": numbers, "networks": found}


def pretrained(settings: Settings, network: str) -> ByArm:
    jobs = [
        Job("cifar100", network, settings.table_4, 0, arm, options=settings.table_4_options) for arm in (NONE, CKA_SR)
    ]
    return arranged(jobs, train(settings, jobs))


# What tables have in common


def jobs_of(
    settings: Settings, dataset: str, recipe: Recipe, arms: Sequence[Arm], seeds: Sequence[int], sparsity: float
) -> list[Job]:
    """Seed by seed: a run that is ended has all arms of the seeds it has."""
    return [
        Job(dataset, settings.network, recipe, seed, arm, sparsity, settings.options) for seed in seeds for arm in arms
    ]


def trained(settings: Settings, arms: Sequence[Arm], seeds: Sequence[int]) -> ByArm:
    """Networks of tables 2 and 3: what several tables have is trained once."""
    jobs = jobs_of(settings, "cifar10", settings.sparse, arms, seeds, settings.sparsity)
    return arranged(jobs, train(settings, jobs))


def arranged(jobs: Sequence[Job], records: Mapping[Job, Record]) -> ByArm:
    found: ByArm = {}
    for job in jobs:
        found.setdefault(job.arm.name, {})[job.seed] = records[job]
    return found


def accuracies(records: Mapping[int, Record]) -> Values:
    return chosen(records, lambda record: record["accuracy"])


def chosen(records: Mapping[int, Record], read: Callable[[Record], float | None]) -> Values:
    """A number of each network that did not diverge."""
    found = {seed: read(record) for seed, record in records.items() if not record["diverged"]}
    return {seed: value for seed, value in found.items() if value is not None}


def compared(by_arm: ByArm, baseline: str, arm: str) -> dict[str, Any]:
    return difference(accuracies(by_arm[arm]), accuracies(by_arm[baseline]))


def described(by_arm: ByArm) -> dict[str, Any]:
    """Accuracy of all arms; how alike layers are, before and after; how hard the penalty pulls; and how weights lie."""
    found: dict[str, Any] = {
        "accuracy": compare_arms({name: accuracies(records) for name, records in by_arm.items()}, "none"),
        "similarity": {},
        "fall": {},
        "diverged": {name: sum(record["diverged"] for record in records.values()) for name, records in by_arm.items()},
    }
    for kind in ("penalised", "biased", "debiased", "all_pairs"):
        after = {name: chosen(records, lambda r, kind=kind: r["after"][kind]) for name, records in by_arm.items()}
        before = {name: chosen(records, lambda r, kind=kind: r["before"][kind]) for name, records in by_arm.items()}
        found["similarity"][kind] = {
            name: {"before": mean(before[name]), "after": mean(after[name])} for name in by_arm
        }
        found["fall"][kind] = {name: difference(after["none"], after[name]) for name in by_arm if name != "none"}
    for key in ("gradient_share_before", "gradient_share"):
        found[key] = {name: mean(chosen(records, lambda r, key=key: r[key])) for name, records in by_arm.items()}
    found["epsilon"] = {
        kind: {
            name: mean(chosen(records, lambda r, kind=kind: epsilon_of(r, kind))) for name, records in by_arm.items()
        }
        for kind in ("all", "kept", "relative")
    }
    found["net_seconds"] = {name: mean(chosen(records, lambda r: r["seconds"])) for name, records in by_arm.items()}
    found["maps"] = maps(by_arm)
    return found


def epsilon_of(record: Record, kind: str, epsilon: str = "0.001") -> float:
    weights = record["weights"]
    return float(weights["relative"] if kind == "relative" else weights[kind][epsilon])


def maps(by_arm: ByArm) -> dict[str, Any]:
    """Of the first seed that has one: how alike all layers are, and the histogram of the kept weights."""
    found = {}
    for name, records in by_arm.items():
        first = next((r for r in records.values() if "map" in r), None)
        if first is not None:
            found[name] = {**first["map"], **{key: first["weights"][key] for key in ("histogram", "limit")}}
    return found


def mean(values: Values) -> float | None:
    return sum(values.values()) / len(values) if values else None


def flat(found: Mapping[str, Any]) -> Numbers:
    """The numbers that claims name, of one table."""
    numbers: Numbers = {
        "none": found["accuracy"]["arms"]["none"]["mean"],
        "none_sd": found["accuracy"]["arms"]["none"]["sd"],
    }
    for name, cell in found["accuracy"]["differences"].items():
        numbers |= {
            f"{name}_gain": cell["difference"],
            f"{name}_low": cell["low"],
            f"{name}_high": cell["high"],
            f"{name}_p": cell["p_holm"],
            f"{name}_detectable": cell["detectable"],
            f"{name}_gradient_share": found["gradient_share_before"][name],
        }
        for kind in ("penalised", "biased", "debiased"):
            numbers[f"{name}_{kind}_fall"] = found["fall"][kind][name]["difference"]
            numbers[f"{name}_{kind}_fall_low"] = found["fall"][kind][name]["low"]
        for kind, arms in found["epsilon"].items():
            pair = arms[name], arms["none"]
            numbers[f"{name}_epsilon_{kind}_rise"] = None if None in pair else pair[0] - pair[1]
    return numbers


# Figures 1 to 3: with a stronger penalty, are layers less alike and weights closer to 0?


Levels = Mapping[float, Mapping[int, Record]]  # weight of the penalty → seed → network


def figure_1(settings: Settings) -> dict[str, Any]:
    """ResNet-56."""
    arms = (NONE, *(sampled(None, 1, weight) for weight in settings.figure_1_weights))
    jobs = [
        Job("cifar10", settings.deep, settings.figure_1, seed, arm, settings.sparsity, settings.options)
        for seed in settings.figure_1_seeds
        for arm in arms
    ]
    return described_by_weight(levels(arms, arranged(jobs, train(settings, jobs))))


def figure_2(settings: Settings) -> dict[str, Any]:
    """ResNet-20: the networks of tables 2 and 3 whose penalty sees all rows of every batch."""
    arms = (NONE, *(sampled(None, 1, weight) for weight in settings.weights))
    return described_by_weight(levels(arms, trained(settings, arms, settings.table_2_seeds)))


def figure_2_full(settings: Settings) -> dict[str, Any]:
    """The same with 160 epochs: networks of table-3-full, and two more weights."""
    return figure_2(replace(settings, sparse=settings.table_5_full))


def figure_3(settings: Settings) -> dict[str, Any]:
    """Weights of the networks of table 4, which are whole [of ImageNet]."""
    numbers: Numbers = {}
    found: dict[str, Any] = {}
    for place, network in zip(("smaller", "larger"), settings.table_4_networks, strict=True):
        found[place] = described_by_weight(levels((NONE, CKA_SR), pretrained(settings, network))) | {"network": network}
        numbers |= {f"{place}_{key}": value for key, value in found[place].pop("numbers").items()}
    return {"numbers": numbers, "networks": found}


def levels(arms: Sequence[Arm], by_arm: Mapping[str, Mapping[int, Record]]) -> Levels:
    return {arm.weight: by_arm[arm.name] for arm in arms}


def described_by_weight(by_weight: Levels) -> dict[str, Any]:
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
    whole, none = by_weight[max(by_weight)], by_weight[0.0]
    by_seed = {
        kind: difference(chosen(whole, read), chosen(none, read))
        for kind, read in (
            ("epsilon_all", lambda one: epsilon_of(one, "all")),
            ("nats", lambda one: one.get("information", {}).get("nats")),
        )
    }
    by_name = {f"{weight:g}": dict(records) for weight, records in by_weight.items()}
    points = {name: [r["information"]["points"] for r in records.values() if "information" in r][:1]
              for name, records in by_name.items()}  # fmt: skip
    return {
        "numbers": numbers,
        "weights": list(by_weight),
        "rows": rows,
        "maps": maps(by_name),
        "information": points,
        "rise_by_seed": by_seed,
    }


def finite(record: Record) -> float | None:
    """Share of pairs of layers whose information is finite."""
    found = record.get("information")
    return found["finite"] / found["pairs"] if found else None


# Table 1, scaled down: a small vision transformer that drops tokens, with and without CKA-SR and token CKA.


RULES = ("learned", "cka", "eq13")
EQ13_BATCH = 100  # token CKA as printed is one of the batch; its memory grows with the square


def table_1(settings: Settings) -> dict[str, Any]:
    """Two transformers, then two dynamic ones of each; the rule of what to keep is changed after training."""
    chosen = settings.tokens
    first = {arm.name: transformers(settings, arm) for arm in (NONE, CKA_SR)}
    plain = {name: 100 * tested(settings, model, chosen.dataset, 500) for name, model in first.items()}
    whole = cost(settings, first["none"])
    numbers: dict[str, float | None] = {f"plain_{name}": value for name, value in plain.items()}
    alike = {name: similarity(settings, model, chosen.dataset) for name, model in first.items()}
    numbers["cka_sr_debiased_fall"] = less(alike["none"]["debiased"], alike["cka_sr"]["debiased"])
    rows = []
    models = fit_dynamic(settings, [copy.deepcopy(first[name]) for name in first for _ in chosen.keeps],
                         [keep for _ in first for keep in chosen.keeps])  # fmt: skip
    cases = [(name, keep) for name in first for keep in chosen.keeps]
    for (name, keep), model in zip(cases, models, strict=True):
        found: dict[str, Any] = {"pretrained": name, "keep": keep, "accuracy": {}, **cost(settings, model)}
        for rule in RULES:
            model.rule = rule  # type: ignore[assignment]
            batch = EQ13_BATCH if rule == "eq13" else 500
            found["accuracy"][rule] = 100 * tested(settings, model, chosen.dataset, batch)
        rows.append(found)
    for place, keep in zip(("low", "high"), chosen.keeps, strict=True):
        without, with_ = (next(r for r in rows if (r["pretrained"], r["keep"]) == (name, keep)) for name in first)
        numbers |= {
            f"{place}_accuracy": without["accuracy"]["learned"],
            f"{place}_gain": with_["accuracy"]["cka"] - without["accuracy"]["learned"],
            f"{place}_gain_of_penalty": with_["accuracy"]["learned"] - without["accuracy"]["learned"],
            f"{place}_gain_of_tokens": without["accuracy"]["cka"] - without["accuracy"]["learned"],
            f"{place}_gain_as_printed": with_["accuracy"]["eq13"] - without["accuracy"]["learned"],
            f"{place}_loss": plain["none"] - without["accuracy"]["learned"],
            f"{place}_flops": without["flops"] / whole["flops"],
            f"{place}_params": without["params"] / whole["params"],
        }
    return {"numbers": numbers, "plain": {"accuracy": plain, **whole, "similarity": alike}, "rows": rows}


def transformers(settings: Settings, arm: Arm) -> nn.Module:
    chosen = settings.tokens
    options = tuple((key, getattr(chosen, key)) for key in ("depth", "width", "patch"))
    model = Job(chosen.dataset, "vit", chosen.first, 0, arm, options=options).build(settings.device)
    with ExitStack() as stack:
        penalty = penalty_of(model, arm)
        own = penalty and stack.enter_context(penalty)
        fit_models(settings, [model], chosen.dataset, chosen.first, [0], penalties=[own])
    return model


@torch.no_grad()
def cost(settings: Settings, model: nn.Module) -> dict[str, int]:
    """Parameters, and operations of one image in evaluation (a multiplication and an addition are two)."""
    x = probes(settings, settings.tokens.dataset, 1)
    with FlopCounterMode(display=False) as counter:
        model.eval()(x)
    return {"params": sum(each.numel() for each in model.parameters()), "flops": counter.get_total_flops()}


def less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def table_5_full_of_records(records: Path) -> dict[str, Any]:
    """Of the seeds that all arms have; a run of all ten replaces it."""
    kept = [json.loads(path.read_text("utf-8")) for path in records.glob("*.json")]
    by_seed = [record["job"]["seed"] for record in kept]
    arms = len({record["job"]["arm"]["name"] for record in kept})
    seeds = tuple(sorted(seed for seed in set(by_seed) if by_seed.count(seed) == arms))
    settings = Settings("cpu", records.parent, records)
    return {
        "seconds": sum(record["seconds"] for record in kept),
        "ran_on": "NVIDIA H200, torch 2.11.0+cu130",
        "seeds": {"run": list(seeds), "asked_for": list(settings.table_5_seeds)},
        **table_5_full(replace(settings, table_5_seeds=seeds)),
    }


EXPERIMENTS = {  # the most important first
    "lemmas": lemmas,
    "dense": dense,
    "table-5": table_5,
    "table-3": table_3,
    "table-2": table_2,
    "cost": cost_of_penalty,  # operations of table 2's penalties, on a CPU
    "figure-2": figure_2,  # networks of tables 2 and 3
    "table-1": table_1,
    "table-4": table_4,
    "figure-3": figure_3,  # networks of table 4
    "figure-1": figure_1,
    "table-5-rest": table_5_rest,
    "table-5-longer": table_5_longer,
    "table-5-full": table_5_full,
    "table-3-full": table_3_full,
    "figure-2-full": figure_2_full,  # networks of table-3-full
}

if __name__ == "__main__":
    running.start(PAPER, EXPERIMENTS, Settings, small, {"table-5-full": table_5_full_of_records})
