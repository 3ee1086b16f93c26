"""Intervals of what was measured: paired by seed, as the results hold them; where one seed was run, with the scatter
of the ten seeds of another sparsity, which is said."""

from __future__ import annotations

import math
from typing import Any

from scatter import Found, Interval, Read, held, of_mean, of_share, of_spread_ratio
from scipy import stats

LEVELS = {"table-5": ("main", "high"), "table-5-longer": ("longer",), "table-5-full": ("full",)}
ARMS = ("cka_sr", "augcka_sr")


def intervals(read: Read) -> Found:
    found: Found = {}
    for table, levels in LEVELS.items():
        for level in levels:
            part = read(table).get("levels", {}).get(level)
            if part:
                found |= {f"{table}/{level}_{key}": interval for key, interval in table_5(part).items()}
    sds = {arm: _sd(read("table-5"), arm) for arm in ARMS}
    falls = {arm: _sd(read("table-5"), arm, "debiased") for arm in ARMS}
    return {
        **found,
        **one_seed(read("table-5-rest").get("numbers", {}), sds),
        **table_3(read("table-3"), "table-3"),
        **table_3(read("table-3-full"), "table-3-full"),
        **table_2(read("table-2")),
        **figures(read, falls["cka_sr"]),
    }


def of(part: dict[str, Any] | None) -> Interval | None:
    """What differences.py made of a difference."""
    if not part or part.get("low") is None:
        return None
    return held((part["low"], part["high"]), f"{part['pairs']} seeds", part["pairs"])


def table_5(part: dict[str, Any]) -> Found:
    found: Found = {}
    for arm in ARMS:
        found[f"{arm}_gain"] = of(part["accuracy"]["differences"].get(arm))
        for kind in ("penalised", "biased", "debiased"):
            found[f"{arm}_{kind}_fall"] = of(part["fall"][kind].get(arm))
    found["augcka_sr_over_cka_sr"] = of(part.get("augmented_over_cka_sr"))
    return found


def _sd(table: dict[str, Any], arm: str, fall: str | None = None) -> tuple[float, int] | None:
    """Of differences between seeds at .95."""
    part = table.get("levels", {}).get("main")
    if not part:
        return None
    found = (part["fall"][fall] if fall else part["accuracy"]["differences"]).get(arm)
    return (found["sd"], found["pairs"]) if found and found.get("sd") else None


def _borrowed(value: float | None, sd: tuple[float, int] | None, of: str, seeds: int = 1) -> Interval | None:
    if value is None or sd is None:
        return None
    half = float(stats.t.ppf(0.975, sd[1] - 1)) * sd[0] / math.sqrt(seeds)
    return Interval(value - half, value + half, of, seeds)


def one_seed(numbers: dict[str, Any], sds: dict[str, tuple[float, int] | None]) -> Found:
    scatter = "1 seed with the scatter of ten at .95"
    return {
        f"table-5-rest/{key}": _borrowed(value, sds[key.split("_", 2)[2].removesuffix("_gain")], scatter)
        for key, value in numbers.items()
        if key.endswith("_gain") and key.startswith("level_")
    } | (
        {"table-5-rest/augcka_sr_ahead": of_share(numbers["augcka_sr_ahead"] / 4, 4, "levels of one seed", times=4)}
        if numbers.get("augcka_sr_ahead") is not None
        else {}
    )


def table_3(found: dict[str, Any], table: str) -> Found:
    if not found:
        return {}
    arms = found["accuracy"]["arms"]
    result: Found = {}
    for arm in ("cca", "cka_sr"):
        result[f"{table}/{arm}_gain"] = of(found["accuracy"]["differences"].get(arm))
        for kind in ("penalised", "biased", "debiased"):
            result[f"{table}/{arm}_{kind}_fall"] = of(found["fall"][kind].get(arm))
    result[f"{table}/cka_sr_over_cca"] = of(found.get("cka_sr_over_cca"))
    none = arms["none"]
    number = len(none["seeds"])
    if none["sd"] and number > 1:
        half = float(stats.t.ppf(0.975, number - 1)) * none["sd"] / math.sqrt(number)
        result[f"{table}/none"] = Interval(none["mean"] - half, none["mean"] + half, f"{number} seeds", number)
        ratio, diverged = found["numbers"]["cca_spread"], found["numbers"]["cca_diverged"]
        if ratio:
            result[f"{table}/cca_spread"] = of_spread_ratio(ratio, number, number, f"{number} seeds")
        result[f"{table}/cca_diverged"] = of_share(diverged / number, number, "seeds", times=number)
    return result


def table_2(found: dict[str, Any]) -> Found:
    if not found:
        return {}
    result: Found = {}
    differences, falls = found["accuracy"]["differences"], found["fall"]["debiased"]
    arms = dict(zip(differences, (f"{sample}_{weight}" for sample in ("all", "eight_5", "eight_10")
                                  for weight in ("weak", "paper", "strong")), strict=False))  # fmt: skip
    for arm, name in arms.items():
        result[f"table-2/{name}_gain"] = of(differences[arm])
        result[f"table-2/{name}_fall"] = of(falls.get(arm))
    known = [gain for name in arms.values() if (gain := result[f"table-2/{name}_gain"]) is not None]
    if len(known) == len(arms):
        sure, perhaps = sum(g.low > 0 for g in known), sum(g.high > 0 for g in known)
        result["table-2/cells_above"] = Interval(sure, perhaps, "cells, surely or perhaps, over 3 seeds", 3)
        seeds = {arm: found["accuracy"]["arms"][arm]["seeds"] for arm in differences}
        whole, few = (next(arm for arm, name in arms.items() if name == n) for n in ("all_paper", "eight_5_paper"))
        each = [seeds[whole][seed] - seeds[few][seed] for seed in seeds[whole] if seed in seeds[few]]
        result["table-2/all_over_eight"] = of_mean(each, "seeds")
    return result


def figures(read: Read, sd: tuple[float, int] | None) -> Found:
    """CKA within stages of figure 2, three seeds, and of figure 1, one, with the scatter of ten seeds of table 5."""
    scatter = "with the scatter of ten at .95 in table 5"
    result: Found = {}
    for figure, seeds in (("figure-1", 1), ("figure-2", 3)):
        numbers = read(figure).get("numbers", {})
        for key in ("biased_rise", "biased_highest_step", "debiased_rise", "all_pairs_rise"):
            interval = _borrowed(numbers.get(key), sd, f"{seeds} seed{'s' * (seeds > 1)} {scatter}", seeds)
            result[f"{figure}/{key}"] = interval
    for figure in ("figure-1", "figure-2", "figure-2-full"):
        for kind, rise in read(figure).get("rise_by_seed", {}).items():
            result[f"{figure}/{kind}_rise"] = of(rise)
    return result
