"""Figures 3 and 4: does a measure say how far networks agree, where they differ in one respect?"""

from __future__ import annotations

from typing import Any

import numpy as np
from measures import candidate
from networks import HEADS, SCRATCH, agree, study
from parallel import each
from settings import OWN, RIVALS, Settings

from sosie.benchmark.population import ALL, ATTACKED, CLEAN, CORRUPTED, GROUPS, PAIR_KINDS
from sosie.benchmark.trials import COEFFICIENTS, difference, ground

WORDS = ("seed", "architecture", "strategy")  # where the paper finds wCKA ahead; epochs: all alike
SLOW = ("deconfounded_cka", "normalized_bures", "weight_cosine_matched", "wcka_lit")  # begun first


def correlate(settings: Settings, population: str, name: str, kind: str) -> dict[str, Any]:
    """One measure over the pairs that differ in `kind`; in words where it has no value at all."""
    at = study(settings, population)
    rows = settings.head_rows if population == HEADS else None
    measure = candidate(name, at.scale, at.seen, paired_rows=settings.paired_rows, rows=rows)
    try:
        found = ground(measure, measure.closer or "up", at.ground, kind)
    except ValueError as error:
        return {"why": str(error), "groups": {}, "values": [], "sign": 1}
    found["values"] = found["values"].tolist()
    return found | {"sign": 1 if measure.closer != "down" else -1}


def lead(settings: Settings, population: str, rival: str, kind: str, own: Any, other: Any) -> dict[str, Any]:
    """How much better wCKA correlates than one rival: for each group of conditions and either coefficient."""
    at = study(settings, population).ground
    return {
        group: {
            name: difference(np.array(own), np.array(other), at, kind, group, ranks=name == "spearman")
            for name in COEFFICIENTS
        }
        for group in GROUPS
    }


def agreed(settings: Settings, population: str) -> dict[str, Any]:
    """How far pairs agree: quartiles for each kind and group of conditions."""
    at = study(settings, population).ground
    return {
        "agreement": {kind: {group: _quartiles(at.agreed(kind, group)) for group in GROUPS} for kind in PAIR_KINDS},
        "pairs": {kind: len(at.pairs(kind)) for kind in PAIR_KINDS},
        "epoch": at.agreed("epoch", ALL).tolist(),
    }


def figure_3(settings: Settings) -> dict[str, Any]:
    return _figure(settings, SCRATCH, settings.measures)


def figure_4(settings: Settings) -> dict[str, Any]:
    return _figure(settings, HEADS, settings.head_measures)


def _figure(settings: Settings, population: str, measures: tuple[str, ...]) -> dict[str, Any]:
    agree(settings, population)
    slow_first = sorted(measures, key=lambda name: name not in SLOW)
    tasks = [(population, name, kind) for name in slow_first for kind in PAIR_KINDS]
    found = dict(zip(tasks, each(settings, correlate, tasks, f"correlations, {population}"), strict=True))
    table = {name: {kind: found[population, name, kind] for kind in PAIR_KINDS} for name in measures}
    pairs = [(rival, kind) for rival in measures for kind in PAIR_KINDS
             if rival != OWN and table[rival][kind]["values"]]  # fmt: skip
    tests = each(settings, lead, [(population, rival, kind, _oriented(table[OWN][kind]), _oriented(table[rival][kind]))
                                  for rival, kind in pairs], f"leads, {population}")  # fmt: skip
    leads = {name: {kind: test for (rival, kind), test in zip(pairs, tests, strict=True) if rival == name}
             for name in measures if name != OWN}  # fmt: skip
    (facts,) = each(settings, agreed, [(population,)], f"agreement of pairs, {population}")
    scatter = {name: [v if np.isfinite(v) else None for v in table[name]["epoch"]["values"]] for name in (OWN, *RIVALS)}
    numbers = {**_coefficients(table), **_leads(leads), **_all_similar(table)}
    for by_kind in table.values():
        for one in by_kind.values():
            one.pop("values")
    return {
        "numbers": numbers, "correlations": table, "leads": leads, "agreement": facts["agreement"],
        "pairs": facts["pairs"], "scatter": {"agreement": facts["epoch"], **scatter},
    }  # fmt: skip


def _oriented(found: dict[str, Any]) -> list[float]:
    return [value * found["sign"] for value in found["values"]]


def _quartiles(values: np.ndarray) -> list[float]:
    return np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()


def _coefficient(table: dict[str, Any], name: str, kind: str, group: str, coefficient: str) -> float | None:
    found = table[name][kind]["groups"].get(group, {}).get(coefficient)
    return None if found is None else found["value"]


def _coefficients(table: dict[str, Any]) -> dict[str, float | None]:
    return {
        f"{kind}_{coefficient}_{name}": _coefficient(table, name, kind, ALL, coefficient)
        for kind in PAIR_KINDS
        for coefficient in COEFFICIENTS
        for name in table
    }


def _leads(leads: dict[str, Any]) -> dict[str, float | None]:
    """Over the best of the paper's three, and over each of the others; by Fisher's z and over models."""
    numbers: dict[str, float | None] = {}
    for kind in PAIR_KINDS:
        for coefficient in COEFFICIENTS:
            for group in GROUPS:
                over = [leads[name].get(kind, {}).get(group, {}).get(coefficient, {}) for name in RIVALS]
                end = "" if group == ALL else f"_{group}"
                whole = all("value" in one for one in over)
                numbers[f"{kind}_{coefficient}_lead{end}"] = min(o["value"] for o in over) if whole else None
                if group == ALL:
                    # a rival that is ahead has no p-value for wCKA's lead: it counts as 1
                    least = max(o["p"] if o["value"] > 0 else 1.0 for o in over) if whole else None
                    numbers[f"{kind}_{coefficient}_lead_p"] = least
                    lows = [o.get("over_models") for o in over]
                    numbers[f"{kind}_{coefficient}_lead_low"] = None if None in lows else min(low for low, _ in lows)
            for name in leads:
                one = leads[name].get(kind, {}).get(ALL, {}).get(coefficient, {})
                numbers[f"{kind}_{coefficient}_over_{name}"] = one.get("value")
    for coefficient in COEFFICIENTS:
        ahead = [numbers[f"{kind}_{coefficient}_lead{end}"] for kind in WORDS
                 for end in ("", *(f"_{group}" for group in (CLEAN, CORRUPTED, ATTACKED)))]  # fmt: skip
        numbers[f"{coefficient}_ahead_of_12"] = None if None in ahead else sum(value > 0 for value in ahead)
    every = [numbers[f"{kind}_{coefficient}_lead"] for kind in PAIR_KINDS for coefficient in COEFFICIENTS]
    numbers["ahead_of_8"] = None if None in every else sum(value > 0 for value in every)
    debiased = [numbers.get(f"{kind}_{c}_over_debiased_cka") for kind in WORDS for c in COEFFICIENTS]
    numbers["ahead_of_debiased_cka_of_6"] = None if None in debiased else sum(value > 0 for value in debiased)
    return numbers


def _all_similar(table: dict[str, Any]) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    for kind in PAIR_KINDS:
        for coefficient in COEFFICIENTS:
            values = [_coefficient(table, name, kind, ALL, coefficient) for name in (OWN, *RIVALS)]
            rivals = values[1:]
            numbers[f"{kind}_{coefficient}_range_of_four"] = None if None in values else max(values) - min(values)
            numbers[f"{kind}_{coefficient}_least_of_four"] = None if None in values else min(values)
            numbers[f"{kind}_{coefficient}_best_rival"] = None if None in rivals else max(rivals)
            numbers[f"{kind}_{coefficient}_worst_rival"] = None if None in rivals else min(rivals)
            best = max(table, key=lambda name: _coefficient(table, name, kind, ALL, coefficient) or -2.0)
            top, own = (_coefficient(table, name, kind, ALL, coefficient) for name in (best, OWN))
            numbers[f"{kind}_{coefficient}_behind_the_best"] = None if top is None or own is None else top - own
    return numbers
