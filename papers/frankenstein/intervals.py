"""Intervals of what was measured: over pairs of networks, where there are pairs; else over what the results hold."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import combinations, pairwise
from statistics import fmean, pstdev
from typing import Any

from scatter import Found, Interval, Read, of_correlation, of_mean, of_resampled, of_share, of_spread, of_summary

COLLAPSED, FAIR, LATE, SPARSE = 0.5, 0.7, 3, 0.85  # as in run.py
PAIRS = "pairs of networks"


def intervals(read: Read) -> Found:
    return {
        **figure_2(read("figure-2").get("architectures", {}).get("tiny10"), "figure-2/tiny10"),
        **figure_2(read("figure-2-ten").get("architectures", {}).get("resnet20"), "figure-2-ten/resnet20"),
        **{
            key: interval
            for arm, part in read("further-results").get("architectures", {}).items()
            for key, interval in figure_2(part, f"further-results/{arm}").items()
        },
        **ckas(read("baseline-cka").get("rows", []), "baseline-cka/{}_linear_cka"),
        **ckas(read("figure-2-ten").get("cka", []), "figure-2-ten/{}_linear_cka"),
        **figure_3(read("figure-3").get("rows", [])),
        **figure_4(read("figure-4").get("runs", [])),
        **figure_6(read("figure-6").get("sites", {})),
        **modes(read("mode-connectivity").get("layers", {})),
        **figure_7(read("figure-7").get("rows", [])),
        **figure_8(pairs_of(read("figure-8"))),
        **across(read),
    }


def figure_2(part: dict[str, Any] | None, name: str) -> Found:
    """The numbers of each pair by themselves, with layers chosen as the mean over pairs has them."""
    if part is None:
        return {}
    sites, rows = part["sites"], part["rows"]
    pairs = list(dict.fromkeys(tuple(row["pair"]) for row in rows))

    def of(kind: str, key: str = "relative_accuracy") -> list[list[float]]:
        """By pair, then by site."""
        held = {(tuple(row["pair"]), row["site"]): row[key] for row in rows if row["kind"] == kind}
        return [[held[pair, site] for site in sites] for pair in pairs]

    task, squares, procrustes = of("task_loss"), of("least_squares"), of("procrustes")
    mean_of = [fmean(column) for column in zip(*task, strict=True)]
    lowest, next_worst = mean_of.index(min(mean_of)), 1 + mean_of[1:].index(min(mean_of[1:]))
    late = [
        abs(fmean(p) - fmean(s)) for p, s in zip(zip(*procrustes, strict=True), zip(*squares, strict=True), strict=True)
    ]
    at = max(range(max(0, len(sites) - LATE), len(sites)), key=late.__getitem__)
    above = 1 if fmean(p[at] - s[at] for p, s in zip(procrustes, squares, strict=True)) >= 0 else -1
    middle = [k for k, site in enumerate(sites) if "layer1.0" <= site <= "layer2.1"]
    found: Found = {
        "task_loss_mean": of_mean([fmean(t) for t in task], PAIRS),
        "task_loss_first_layer": of_mean([t[0] for t in task], PAIRS),
        "task_loss_lowest_layer": of_mean([t[lowest] for t in task], PAIRS),
        "first_layer_below_the_next_worst": of_mean([t[next_worst] - t[0] for t in task], PAIRS),
        "task_loss_above_least_squares": of_mean(
            [fmean(t) - fmean(s) for t, s in zip(task, squares, strict=True)], PAIRS
        ),
        "least_squares_collapsed_layers": of_mean([sum(v < COLLAPSED for v in s) for s in squares], PAIRS),
        "least_squares_fair_share": of_mean([fmean(v >= FAIR for v in s) for s in squares], PAIRS),
        "procrustes_difference_late": of_mean(
            [above * (p[at] - s[at]) for p, s in zip(procrustes, squares, strict=True)], PAIRS
        ),
        "unstitched_cross_entropy": of_mean([fmean(i) for i in of("identity", "cross_entropy")], PAIRS),
    }
    if middle:
        weakest = min(middle, key=lambda k: fmean(s[k] for s in squares))
        found["least_squares_layer1.0_to_2.1"] = of_mean([s[weakest] for s in squares], PAIRS)
    labels = {(tuple(row["pair"]), row["site"]): row["relative_accuracy"] for row in rows if row["kind"] == "labels"}
    soft = {(tuple(row["pair"]), row["site"]): row["relative_accuracy"] for row in rows if row["kind"] == "task_loss"}
    both = [(value, soft[key]) for key, value in labels.items()]
    if both:
        found["labels_against_soft"] = of_correlation(_pearson(both), len(both), "layers of three pairs")
    return {f"{name}_{key}": interval for key, interval in found.items()}


def _pearson(pairs: list[tuple[float, float]]) -> float:
    x, y = zip(*pairs, strict=True)
    products = fmean((a - fmean(x)) * (b - fmean(y)) for a, b in pairs)
    return products / (pstdev(x) * pstdev(y)) if pstdev(x) and pstdev(y) else float("nan")


def ckas(rows: list[dict[str, Any]], name: str) -> Found:
    found: Found = {}
    for network in dict.fromkeys(row.get("network", "resnet20") for row in rows):
        by_pair: dict[Any, list[float]] = {}
        for row in rows:
            if row.get("network", "resnet20") == network:
                by_pair.setdefault(tuple(row["pair"]), []).append(row["linear_cka"])
        found[name.format(network)] = of_mean([fmean(values) for values in by_pair.values()], PAIRS)
    return found


def figure_3(rows: list[dict[str, Any]]) -> Found:
    """A unit is a pair, all its layers as one; of fewer than three pairs a layer of a pair, at all widths."""
    held: dict[Any, dict[int, list[float]]] = {}
    few, of = _units({str(row["pair"]) for row in rows})
    for row in rows:
        if row["kind"] == "task_loss":
            unit = held.setdefault((str(row["pair"]), row["site"] if few else ""), {})
            unit.setdefault(row["width"], []).append(row["relative_accuracy"])
    whole = [{width: fmean(values) for width, values in unit.items()} for unit in held.values()]
    if not whole:
        return {}
    widths = sorted(whole[0])

    def with_width(drawn: list[dict[int, float]]) -> float:
        return _pearson([(width, fmean(unit[width] for unit in drawn)) for width in widths])

    return {
        "figure-3/task_loss_at_width_1": of_mean([unit[widths[0]] for unit in whole], of),
        "figure-3/task_loss_correlation_with_width": of_resampled(whole, with_width, of),
    }


def _units(pairs: Collection[Any]) -> tuple[bool, str]:
    """Whether there are too few pairs for a scatter, so that their layers are taken as units; and in words."""
    names = {1: "layers of one pair", 2: "layers of two pairs"}
    return len(pairs) in names, names.get(len(pairs), PAIRS)


def figure_4(runs: list[list[dict[str, float]]]) -> Found:
    if not runs:
        return {}

    def change(key: str) -> list[float]:
        return [run[-1][key] - run[0][key] for run in runs]

    def spread_at_first(drawn: list[Any]) -> float:
        start, first = ([run[k]["linear_cka"] for run in drawn] for k in (0, 1))
        return pstdev(first) / pstdev(start) if pstdev(start) else float("nan")

    along = [_pearson([(record["svcca"], record["cross_entropy"]) for record in run]) for run in runs]
    farthest = [max(abs(record["mean_cca"] - run[0]["mean_cca"]) for record in run) for run in runs]
    of = "pairs of networks"
    return {
        "figure-4/cross_entropy_change": of_mean(change("cross_entropy"), of),
        "figure-4/cka_change": of_mean(change("linear_cka"), of),
        "figure-4/r2_change": of_mean(change("r2_about_zero"), of),
        "figure-4/cka_spread_at_first_epoch_over_start": of_resampled(runs, spread_at_first, of),
        "figure-4/svcca_correlation_with_cross_entropy": of_mean(along, of),
        "figure-4/cca_largest_change": of_resampled(farthest, max, of),
    }


def figure_6(sites: dict[str, dict[str, list[float]]]) -> Found:
    if not sites:
        return {}
    least = {site: fmean(of["least_squares"]) for site, of in sites.items()}
    close = [abs(value - least[site]) <= 0.1 for site, of in sites.items() for value in of["random"]]
    widest = max((pstdev(of["least_squares"]), len(of["least_squares"])) for of in sites.values())
    return {
        "figure-6/random_of_the_same_order": of_share(fmean(close), len(close), "random starts"),
        "figure-6/largest_spread_of_least_squares": of_spread(*widest, "starts"),
    }


def modes(layers: dict[str, Any]) -> Found:
    """Lines between the maps that were kept, the maps left out one by one; the smallest fall is that of one layer."""
    if not layers:
        return {}
    falls = {layer: [min(line[0], line[-1]) - min(line) for line in found["lines"]] for layer, found in layers.items()}
    early = list(falls)[:3]
    least = min(early, key=lambda layer: fmean(falls[layer]) if falls[layer] else 0.0)
    connected = [found["fall"] <= 0.1 for found in layers.values() if found["fall"] is not None]
    maps = layers[least]["kept"]
    fall: Interval | None = of_mean(falls[least], f"lines at {least}")
    if maps > 4:
        lines = list(zip(combinations(range(maps), 2), falls[least], strict=True))
        left = [fmean(fall for ends, fall in lines if out not in ends) for out in range(maps)]
        error = math.sqrt((maps - 1) / maps * sum((one - fmean(left)) ** 2 for one in left))
        fall = of_summary(fmean(falls[least]), error * math.sqrt(maps), maps, f"maps at {least}, left out one by one")
    return {
        "mode-connectivity/smallest_fall_early": fall,
        "mode-connectivity/share_of_connected_layers": of_share(fmean(connected), len(connected), "layers")
        if connected
        else None,
    }


def figure_7(rows: list[dict[str, Any]]) -> Found:
    at = {(str(r["pair"]), r["site"], r["way"], r["rank"]): r["relative_accuracy"] for r in rows}
    found: Found = {}
    for rank in dict.fromkeys(row["rank"] for row in rows):
        gaps: dict[str, dict[str, float]] = {}  # by site, then by pair
        for pair, site, way, of_rank in at:
            if way == "task_loss" and of_rank == rank:
                gaps.setdefault(site, {})[pair] = at[pair, site, way, rank] - at[pair, site, "reduced_rank", rank]
        pairs = list(next(iter(gaps.values())))
        few, of = _units(pairs)
        whole = [gap for of_site in gaps.values() for gap in of_site.values()]
        by_pair = [fmean(of_site[pair] for of_site in gaps.values()) for pair in pairs]
        found[f"figure-7/gap_at_rank_{rank}"] = of_mean(whole if few else by_pair, of)
        least = min(gaps, key=lambda site: fmean(gaps[site].values()))
        found[f"figure-7/smallest_gap_at_rank_{rank}"] = of_mean(gaps[least].values(), f"pairs at {least}")
    return found


def pairs_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of one pair have its sites alone."""
    return found.get("pairs", [found["sites"]] if found else [])


def figure_8(pairs: list[dict[str, Any]]) -> Found:
    few, of = _units(pairs)
    drops, above = [], []
    for sites in pairs:
        direct = [_interpolated(site["direct"]) for site in sites.values()]
        task = [_interpolated(site["task_loss"]) for site in sites.values()]
        first = [site["direct"][0][1] for site in sites.values()]
        drops.append([start - d for start, d in zip(first, direct, strict=True) if d is not None])
        above.append([t - d for t, d in zip(task, direct, strict=True) if None not in (t, d)])
    return {
        f"figure-8/{key}_at_85_percent": of_mean(
            [value for pair in values for value in pair] if few else [fmean(pair) for pair in values if pair], of
        )
        for key, values in (("direct_drop", drops), ("task_loss_above_direct", above))
    }


def _interpolated(points: list[list[float]]) -> float | None:
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= SPARSE <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (SPARSE - x0) / (x1 - x0)
    return None


def across(read: Read) -> Found:
    layers = "layers of one pair"
    sets = read("data-sets").get("curves", {})
    drops = [
        a["relative_accuracy"] - b["relative_accuracy"]
        for a, b in zip(sets.get("cifar10", []), sets.get("cifar100", []), strict=True)
    ]
    control = read("control").get("curves", {})
    below = [
        a["relative_accuracy"] - b["relative_accuracy"]
        for a, b in zip(control.get("trained_to_trained", []), control.get("random_to_trained", []), strict=True)
    ]
    architectures = read("architectures")
    by_arm: dict[str, list[list[float]]] = {}
    for curves in architectures.get("pairs", [architectures.get("curves", {})]):
        for name, rows in curves.items():
            by_arm.setdefault(name, []).append([row["relative_accuracy"] for row in rows])
    found: Found = {}
    for name, pairs in by_arm.items():
        few, of = _units(pairs)
        values = [value for pair in pairs for value in pair] if few else [fmean(pair) for pair in pairs]
        found[f"architectures/{name}"] = of_mean(values, of)
    return {
        "data-sets/cifar100_drop": of_mean(drops, layers),
        **found,
        "control/trained_above_random_below": of_mean(below, layers),
    }
