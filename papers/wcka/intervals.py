"""Intervals of what was measured: over pairs of networks, or over training runs drawn again, as the results have it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scatter import Found, Interval, Read, held, of_mean, of_spread_ratio

MEASURES = ("wcka", "normalized_bures", "linear_cka", "deconfounded_cka")
RIVALS = MEASURES[1:]
RELATIONS = ("seed", "epoch", "architecture", "strategy")
COEFFICIENTS = ("pearson", "spearman")
PAIRS = "pairs of networks"
RUNS = "training runs"
OF_RUNS = 75  # of perceptrons; heads: 30


def intervals(read: Read) -> Found:
    return {
        **calibration(read("figure-1")),
        **of_populations(read("figure-3"), "figure-3", OF_RUNS),
        **of_populations(read("figure-4"), "figure-4", 30),
        **kinds(read("figure-5")),
    }


def calibration(found: dict[str, Any]) -> Found:
    if not found:
        return {}
    result: Found = {}
    for kind, measures in found["distributions"].items():
        for name, of in measures.items():
            for which in ("alike", "unlike"):
                result[f"figure-1/{kind}_{name}_{which}_mean"] = of_mean(of.get(which) or [], PAIRS)
    chance = found["numbers"].get("wcka_chance")
    unlike = result.get("figure-1/mixed_wcka_unlike_mean")
    if unlike and chance:
        result["figure-1/wcka_unlike_over_chance"] = Interval(
            unlike.low / chance, unlike.high / chance, unlike.of, unlike.units
        )
    for name, rows in found["by_number"].items():
        at = dict(rows)
        numbers = sorted(at)
        if len(numbers) < 2 or any(at[n].get("unlike_sd") is None for n in numbers):
            continue
        some = 1000 if 1000 in at else numbers[-1]
        for key, (first, second) in {"drop": (numbers[0], some), "settled": (some, numbers[-1])}.items():
            a, b = at[first], at[second]
            half = 1.96 * math.hypot(a["unlike_sd"], b["unlike_sd"]) / 10
            value = found["numbers"].get(f"{name}_{key}")
            if value is not None:
                result[f"figure-1/{name}_{key}"] = Interval(value - half, value + half, f"100 {PAIRS}", 100)
        if at[some]["unlike_sd"]:
            ratio = at[numbers[0]]["unlike_sd"] / at[some]["unlike_sd"]
            result[f"figure-1/{name}_narrowed"] = of_spread_ratio(ratio, 100, 100, f"100 {PAIRS}")
    for name, moved in found.get("settled", {}).items():  # pair by pair: the same networks, with more images
        toward = -1 if sum(moved) < 0 else 1
        result[f"figure-1/{name}_settled"] = of_mean([toward * x for x in moved], PAIRS)
    return {**result, **times(found)}


def times(found: dict[str, Any]) -> Found:
    """wCKA reads no image: its six times are six of one work, and their scatter is that of timing."""
    seconds = {name: [pair[1] for pair in rows] for name, rows in found.get("pair_seconds", {}).items()}
    logs = np.log(seconds.get("wcka", []))
    if len(logs) < 2:
        return {}
    half = 2.571 * float(logs.std(ddof=1)) * math.sqrt(2)
    ratios = [f"{name}_slowdown" for name in RIVALS] + ["least_rival_over_wcka", "least_rival_over_wcka_matrices_given",
                                                        "wcka_slowest_over_fastest"]  # fmt: skip
    return {
        f"figure-1/{key}": Interval(value * math.exp(-half), value * math.exp(half), "6 times of one work", 6)
        for key in ratios
        if (value := found["numbers"].get(key)) is not None
    }


def of_populations(found: dict[str, Any], figure: str, runs: int) -> Found:
    """Of the means over populations: how far each interval goes to either side adds as squares."""
    parts = found.get("populations", [])
    if len(parts) < 2:
        return correlations(found, figure, runs)
    every = [correlations(part, figure, runs) for part in parts]
    result: Found = {}
    for key in dict.fromkeys(key for one in every for key in one):
        values = [part["numbers"][key.partition("/")[2]] for part in parts]
        known = [interval for one in every if (interval := one.get(key)) is not None]
        if len(known) < len(parts):  # of a range only that between wCKA and another has one
            result[key] = of_mean(values, f"populations of {runs} {RUNS}")
            continue
        ends = list(zip(values, known, strict=True))
        down = math.hypot(*(value - interval.low for value, interval in ends))
        up = math.hypot(*(interval.high - value for value, interval in ends))
        middle, of = sum(values) / len(values), f"{len(parts)} populations of {runs} {RUNS}, drawn again"
        result[key] = Interval(middle - down / len(parts), middle + up / len(parts), of, len(parts))
    return result


def correlations(found: dict[str, Any], figure: str, runs: int) -> Found:
    """A lead is that over the best of the three others, and has the interval of the lead over this one."""
    if not found:
        return {}
    of = f"{runs} {RUNS}, drawn again"
    result: Found = {}
    for relation in RELATIONS:
        for coefficient in COEFFICIENTS:
            name = f"{figure}/{relation}_{coefficient}"
            values = {m: found["correlations"].get(m, {}).get(relation, {}).get("groups", {}).get("all", {})
                      .get(coefficient, {}) for m in MEASURES}  # fmt: skip
            leads = {m: found["leads"].get(m, {}).get(relation, {}).get("all", {}).get(coefficient) for m in RIVALS}
            known = {m: lead for m, lead in leads.items() if lead and lead.get("value") is not None}
            by_value = {m: v["value"] for m, v in values.items() if v.get("value") is not None}
            if not known or len(by_value) < len(MEASURES):
                continue
            result[f"{name}_lead"] = held(
                min(known.values(), key=lambda lead: lead["value"]).get("over_models"), of, runs
            )
            result[f"{name}_wcka"] = held(values["wcka"].get("over_models"), of, runs)
            least = min(by_value, key=by_value.__getitem__)
            result[f"{name}_least_of_four"] = held(values[least].get("over_models"), of, runs)
            rivals = {m: by_value[m] for m in RIVALS}
            for key, chosen in (("best", max), ("worst", min)):
                which = chosen(rivals, key=rivals.__getitem__)
                result[f"{name}_{key}_rival"] = held(values[which].get("over_models"), of, runs)
            if max(by_value, key=by_value.__getitem__) == "wcka" and least in known:
                result[f"{name}_range_of_four"] = held(known[least].get("over_models"), of, runs)
    return result


def kinds(found: dict[str, Any]) -> Found:
    result: Found = {}
    for name, kinds_of in found.get("kinds", {}).items():
        means = [np.mean(of["unlike"]) for of in kinds_of.values() if of.get("unlike")]
        result[f"figure-5/{name}_mean"] = of_mean(means, "kinds of images")
        fog, noise = (kinds_of.get(kind, {}).get("unlike") or [] for kind in ("fog", "impulse_noise"))
        if len(fog) > 1 and len(noise) > 1:
            half = 1.96 * math.hypot(
                np.std(fog, ddof=1) / math.sqrt(len(fog)), np.std(noise, ddof=1) / math.sqrt(len(noise))
            )
            value = float(np.mean(fog) - np.mean(noise))
            of = f"{len(fog)} {PAIRS}"
            result[f"figure-5/{name}_fog_minus_impulse_noise"] = Interval(value - half, value + half, of, len(fog))
            if np.std(noise):
                ratio = float(np.std(fog, ddof=1) / np.std(noise, ddof=1))
                result[f"figure-5/{name}_fog_sd_over_impulse_noise"] = of_spread_ratio(ratio, len(fog), len(noise), of)
    return result
