"""Figures 1, 7 and 8: networks of the same and of different data sets, layer by layer.

A good comparison, says the paper, (1) finds networks of one data set more alike than networks of two, (2) finds
CIFAR-10 and CIFAR-100 more alike than either and digits, (3) finds CIFAR-10 and digits (ten classes each) more alike
than CIFAR-100 and digits. Two sketches of the same data share their rows ("shared"), or every network has a
sketch of its own ("independent"); sketches of different data share no rows either way.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from represent import SITES, in_threads, mean, represent, spread
from settings import RESNET18, Study

import sosie

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
