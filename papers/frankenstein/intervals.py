"""Intervals of what was measured: over pairs of networks, where there are pairs; else over what the results hold."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

from scatter import Found, Read, of_correlation, of_mean, of_resampled, of_share, of_spread

COLLAPSED, FAIR, LATE, SPARSE = 0.5, 0.7, 3, 0.85  # as in run.py
PAIRS = "pairs of networks"


def intervals(read: Read) -> Found:
    return {
        **figure_2(read("figure-2").get("architectures", {}).get("tiny10"), "figure-2/tiny10"),
        **figure_2(read("figure-2-ten").get("architectures", {}).get("resnet20"), "figure-2-ten/resnet20"),
        **ckas(read("baseline-cka").get("rows", []), "baseline-cka/{}_linear_cka"),
        **ckas(read("figure-2-ten").get("cka", []), "figure-2-ten/{}_linear_cka"),
        **figure_3(read("figure-3").get("rows", [])),
        **figure_4(read("figure-4").get("runs", [])),
        **figure_6(read("figure-6").get("sites", {})),
        **modes(read("mode-connectivity").get("layers", {})),
        **figure_7(read("figure-7").get("rows", [])),
        **figure_8(read("figure-8").get("sites", {})),
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
    """A unit is a layer of a pair, at all widths."""
    units: dict[Any, dict[int, float]] = {}
    for row in rows:
        if row["kind"] == "task_loss":
            units.setdefault((str(row["pair"]), row["site"]), {})[row["width"]] = row["relative_accuracy"]
    whole = list(units.values())
    if not whole:
        return {}
    widths = sorted(whole[0])

    def with_width(drawn: list[dict[int, float]]) -> float:
        return _pearson([(width, fmean(unit[width] for unit in drawn)) for width in widths])

    of = "layers of two pairs"
    return {
        "figure-3/task_loss_at_width_1": of_mean([unit[widths[0]] for unit in whole], of),
        "figure-3/task_loss_correlation_with_width": of_resampled(whole, with_width, of),
    }


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
    """Lines between the maps that were kept; the smallest fall is that of one layer."""
    if not layers:
        return {}
    falls = {layer: [min(line[0], line[-1]) - min(line) for line in found["lines"]] for layer, found in layers.items()}
    early = list(falls)[:3]
    least = min(early, key=lambda layer: fmean(falls[layer]) if falls[layer] else 0.0)
    connected = [found["fall"] <= 0.1 for found in layers.values() if found["fall"] is not None]
    return {
        "mode-connectivity/smallest_fall_early": of_mean(falls[least], f"lines at {least}"),
        "mode-connectivity/share_of_connected_layers": of_share(fmean(connected), len(connected), "layers")
        if connected
        else None,
    }


def figure_7(rows: list[dict[str, Any]]) -> Found:
    at = {(str(r["pair"]), r["site"], r["way"], r["rank"]): r["relative_accuracy"] for r in rows}
    found: Found = {}
    for rank in dict.fromkeys(row["rank"] for row in rows):
        gaps: dict[str, list[float]] = {}
        for pair, site, way, of_rank in at:
            if way == "task_loss" and of_rank == rank:
                gaps.setdefault(site, []).append(at[pair, site, way, rank] - at[pair, site, "reduced_rank", rank])
        of = "layers of two pairs"
        found[f"figure-7/gap_at_rank_{rank}"] = of_mean([gap for each in gaps.values() for gap in each], of)
        least = min(gaps, key=lambda site: fmean(gaps[site]))
        found[f"figure-7/smallest_gap_at_rank_{rank}"] = of_mean(gaps[least], f"pairs at {least}")
    return found


def figure_8(sites: dict[str, Any]) -> Found:
    drops, above = [], []
    for site in sites.values():
        direct, task = _interpolated(site["direct"]), _interpolated(site["task_loss"])
        if direct is not None:
            drops.append(site["direct"][0][1] - direct)
            if task is not None:
                above.append(task - direct)
    return {
        "figure-8/direct_drop_at_85_percent": of_mean(drops, "layers of one pair"),
        "figure-8/task_loss_above_direct_at_85_percent": of_mean(above, "layers of one pair"),
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
    architectures = read("architectures").get("curves", {})
    control = read("control").get("curves", {})
    below = [
        a["relative_accuracy"] - b["relative_accuracy"]
        for a, b in zip(control.get("trained_to_trained", []), control.get("random_to_trained", []), strict=True)
    ]
    return {
        "data-sets/cifar100_drop": of_mean(drops, layers),
        **{
            f"architectures/{name}": of_mean([row["relative_accuracy"] for row in rows], layers)
            for name, rows in architectures.items()
        },
        "control/trained_above_random_below": of_mean(below, layers),
    }
