"""Intervals of what was measured: over networks."""

from __future__ import annotations

import math
from typing import Any

from scatter import Found, Interval, Read, held, of_correlation, of_share

CHILDREN, ORPHANS = 120, 40  # half of them with the threshold that the other half chose
TRIED = 80  # networks that were fine-tuned


def intervals(read: Read) -> Found:
    return {**nearest(read("relatives")), **bases(read("relatives")), **recommended(read)}


def nearest(found: dict[str, Any]) -> Found:
    """Wilson's, as the results hold them."""
    result: Found = {}
    for group, kinds in found.get("nearest", {}).items():
        for kind, relations in kinds.items():
            for relation, each in relations.items():
                if isinstance(each, dict) and each.get("low") is not None:
                    name, of = f"relatives/{group}_{relation}_{kind}", f"{each['n']} networks"
                    result[name] = held((each["low"], each["high"]), of, each["n"])
                    if each.get("chance") is not None:
                        ends = each["low"] - each["chance"], each["high"] - each["chance"]
                        result[f"{name}_over_chance"] = held(ends, of, each["n"])
    return result


def bases(found: dict[str, Any]) -> Found:
    scores = found.get("bases", {}).get("scores", {})
    result: Found = {}
    for name, score in scores.items():
        for key, children in (("auroc", CHILDREN), ("auroc_fine_tuned", TRIED)):
            if score.get(key) is not None:
                result[f"relatives/base_{key}_{name}"] = _auroc(score[key], children, ORPHANS)
        elsewhere = score.get("elsewhere") or {}
        recall, precision = elsewhere.get("family_recall"), elsewhere.get("family_precision")
        if recall is None or not precision:
            continue
        children = CHILDREN // 2
        named = round(recall * children / precision)
        prefix = "relatives/base_elsewhere"
        result[f"{prefix}_family_recall_{name}"] = of_share(recall, children, "children")
        result[f"{prefix}_family_precision_{name}"] = of_share(precision, named, "bases that were named")
        result[f"{prefix}_orphans_named_{name}"] = of_share(elsewhere["orphans_named"], ORPHANS // 2, "networks")
    copies = {"rounded": 13, "trained_on": 14}
    for key, number in copies.items():
        share = found.get("numbers", {}).get(f"duplicates_3_{key}")
        if share is not None:
            result[f"relatives/duplicates_3_{key}"] = of_share(share, number, "copies")
    return result


def _auroc(area: float, yes: int, no: int) -> Interval:
    """Hanley and McNeil."""
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (yes - 1) * (one - area**2) + (no - 1) * (two - area**2)) / (yes * no)
    half = 1.96 * math.sqrt(variance)
    return Interval(area - half, area + half, f"{yes} and {no} networks", no)


def recommended(read: Read) -> Found:
    result: Found = {}
    for experiment, number in (("recommend", TRIED), ("finetune-again", TRIED)):
        for key, value in read(experiment).get("numbers", {}).items():
            if value is not None and key.endswith(("spearman", "agreement")):
                result[f"{experiment}/{key}"] = of_correlation(value, number, "networks")
    return result
