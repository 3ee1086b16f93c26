"""What the maps are like: where training starts (Figure 6), mode connectivity, low rank (Figure 7), sparsity (8)."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import torch
from joining import join, mean, row_of, spread
from networks import fit_batches, held_out, tiny10
from settings import Settings

import sosie

CLOSE = 0.1  # relative accuracies that differ by no more are "of the same order"
CONNECTED = 0.1  # the most that relative accuracy may fall between two maps that are connected
EARLY = ("bn1", "bn2", "bn3")  # "the first three layers"
SPARSE = 0.85  # "at around 80-90 % sparsity"


def figure_6(settings: Settings) -> dict[str, Any]:
    """Fifty random starts and fifty from least squares, the latter with other orders of the images, side by side."""
    a, b = tiny10(0, settings), tiny10(1, settings)
    found: dict[str, Any] = {"numbers": {}, "sites": {}}
    seeds = range(settings.starts)
    fits = [settings.long_task(start=start, seed=seed) for start in ("random", "least_squares") for seed in seeds]
    for site in settings.start_sites:
        rows = join(a, site, b, site, fits, settings, fit_batches(settings, count=settings.start_images))
        accuracies = [row["relative_accuracy"] for row in rows]
        found["sites"][site] = {"random": accuracies[: len(seeds)], "least_squares": accuracies[len(seeds) :]}
    random, fitted = ([x for site in found["sites"].values() for x in site[key]] for key in ("random", "least_squares"))
    close = [abs(x - mean(site["least_squares"])) <= CLOSE for site in found["sites"].values() for x in site["random"]]
    found["numbers"] = {
        "random_lowest": min(random),
        "random_mean": mean(random),
        "least_squares_lowest": min(fitted),
        "least_squares_mean": mean(fitted),
        "largest_spread_of_least_squares": max(spread(site["least_squares"]) for site in found["sites"].values()),
        "random_of_the_same_order": mean(close),
        "least_squares_lowest_above_random_lowest": min(fitted) - min(random),
    }
    return found


def mode_connectivity(settings: Settings) -> dict[str, Any]:
    """Relative accuracy on the line between two maps that were found from different random starts."""
    a, b = tiny10(0, settings), tiny10(1, settings)
    fits = [settings.long_task(start="random", seed=seed) for seed in range(settings.modes)]
    layers: dict[str, Any] = {}
    for site in settings.tiny_sites:
        stitches = sosie.stitch(a, site, b, site, fit_batches(settings), fit=fits)
        ends = [row_of(each, settings)["relative_accuracy"] for each in stitches]
        good = [k for k, end in enumerate(ends) if end >= settings.good]
        lines = [[ends[i], *between(stitches[i], stitches[j], settings), ends[j]] for i, j in combinations(good, 2)]
        falls = [min(line[0], line[-1]) - min(line) for line in lines]
        layers[site] = {"ends": ends, "kept": len(good), "lines": lines, "fall": mean(falls) if falls else None}
    early = [layers[site]["fall"] for site in settings.tiny_sites if site in EARLY]
    late = [layers[site]["fall"] for site in settings.tiny_sites if site not in EARLY]
    known = [[fall for fall in falls if fall is not None] for falls in (early, late)]
    return {
        "numbers": {
            "smallest_fall_early": min(known[0], default=None),
            "largest_fall_early": max(known[0], default=None),
            "largest_fall_late": max(known[1], default=None),
            "share_of_connected_layers": mean([fall <= CONNECTED for fall in (*known[0], *known[1])]),
            "fewest_maps_kept": min(layer["kept"] for layer in layers.values()),
        },
        "steps": settings.steps,
        "layers": layers,
    }


@torch.no_grad()
def between(one: Any, other: Any, settings: Settings) -> list[float]:
    """Relative accuracies inside the line from one joint to the other; the first is put back afterwards."""
    joint, target = one.model.joint, other.model.joint
    kept = {name: parameter.clone() for name, parameter in joint.named_parameters()}
    found = []
    for step in range(1, settings.steps):
        share = step / settings.steps
        for name, parameter in joint.named_parameters():
            parameter.copy_((1 - share) * kept[name] + share * target.get_parameter(name))
        found.append(one.evaluate(held_out(settings))["relative_accuracy"])
    for name, parameter in joint.named_parameters():
        parameter.copy_(kept[name])
    return found


def figure_7(settings: Settings) -> dict[str, Any]:
    """Low rank by reduced-rank regression, by cutting off singular values of the map, and by a bottleneck."""
    ways = {
        "reduced_rank": "reduced_rank(k={})",
        "truncated": "reduced_rank(k={}, truncate=True)",
        "task_loss": settings.task(rank=0).replace("rank=0", "rank={}"),
    }
    keys = [(way, rank) for way in ways for rank in settings.ranks]
    rows = []
    for seed_a, seed_b in settings.tiny_pairs[: settings.rank_pairs]:
        a, b = tiny10(seed_a, settings), tiny10(seed_b, settings)
        for site in settings.tiny_sites:
            joined = join(a, site, b, site, [ways[way].format(rank) for way, rank in keys], settings)
            for (way, rank), row in zip(keys, joined, strict=True):
                rows.append({"pair": [seed_a, seed_b], "site": site, "way": way, "rank": rank, **row, "history": []})
    table = {
        way: {rank: {s: mean(_accuracies(rows, way, rank, s)) for s in settings.tiny_sites} for rank in settings.ranks}
        for way in ways
    }
    gaps = {
        rank: [table["task_loss"][rank][s] - table["reduced_rank"][rank][s] for s in settings.tiny_sites]
        for rank in settings.ranks
    }
    return {
        "numbers": {
            **{f"gap_at_rank_{rank}": mean(gap) for rank, gap in gaps.items()},
            **{f"smallest_gap_at_rank_{rank}": min(gap) for rank, gap in gaps.items()},
        },
        "table": table,
        "rows": rows,
    }


def _accuracies(rows: list[dict[str, Any]], way: str, rank: int, site: str) -> list[float]:
    return [r["relative_accuracy"] for r in rows if (r["way"], r["rank"], r["site"]) == (way, rank, site)]


def figure_8(settings: Settings) -> dict[str, Any]:
    """Lasso and L1 with the task loss; weights below the threshold are set to zero in both."""
    a, b = tiny10(0, settings), tiny10(1, settings)
    direct = ["least_squares", *(f"lasso(alpha={alpha})" for alpha in settings.alphas)]
    trained = [settings.task(), *(settings.task(l1=l1, threshold=settings.threshold) for l1 in settings.l1s)]
    sites: dict[str, Any] = {}
    for site in settings.sparse_sites:
        stitches = sosie.stitch(a, site, b, site, fit_batches(settings), fit=[*direct, *trained])
        points = []
        for found in stitches:
            weight = found.model.joint.weight
            zero = weight.abs() < settings.threshold
            with torch.no_grad():
                weight[zero] = 0
            points.append([float(zero.double().mean()), row_of(found, settings)["relative_accuracy"]])
        sites[site] = {"direct": sorted(points[: len(direct)]), "task_loss": sorted(points[len(direct) :])}
    at = {way: [interpolated(site[way], SPARSE) for site in sites.values()] for way in ("direct", "task_loss")}
    reached = [
        (task, direct) for task, direct in zip(at["task_loss"], at["direct"], strict=True) if None not in (task, direct)
    ]
    drops = [
        s["direct"][0][1] - value for s, value in zip(sites.values(), at["direct"], strict=True) if value is not None
    ]
    return {
        "numbers": {
            "direct_drop_at_85_percent": mean(drops) if drops else None,
            "task_loss_above_direct_at_85_percent": mean([t - d for t, d in reached]) if reached else None,
            "task_loss_at_85_percent": mean([t for t, _ in reached]) if reached else None,
            "layers_compared": len(reached),
        },
        "sites": sites,
    }


def interpolated(points: list[list[float]], sparsity: float) -> float | None:
    """Relative accuracy at a sparsity, on the line between its neighbours; None outside of what was reached."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= sparsity <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (sparsity - x0) / (x1 - x0)
    return None
