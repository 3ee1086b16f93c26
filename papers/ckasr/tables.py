"""Tables 2 to 5 and the dense networks: what a penalty does to accuracy, and to what it penalises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from differences import Values, compare_arms, difference
from settings import AUGMENTED, CCA, CKA_SR, NONE, Arm, Recipe, Settings, sampled
from training import Job, Record, step_seconds, train

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
