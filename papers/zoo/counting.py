"""Statistics of what was found: shares, ranks, regret."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from sosie.benchmark.trials import percentile_interval, weighted_spearman

Array = np.ndarray


def share(hits: Sequence[bool], chances: Sequence[float]) -> dict[str, Any]:
    """How often, with Wilson's interval, and how often a neighbour drawn at random would do: the mean of chances."""
    if not hits:
        return {"n": 0, "share": None, "low": None, "high": None, "chance": None}
    found = sum(hits) / len(hits)
    low, high = map(float, stats.binomtest(sum(hits), len(hits)).proportion_ci(method="wilson"))
    return {"n": len(hits), "share": found, "low": low, "high": high, "chance": sum(chances) / len(chances)}


def auroc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """How often a positive is above a negative, ties counted half."""
    if not positive or not negative:
        raise ValueError(f"need both kinds, got {len(positive)} positives and {len(negative)} negatives")
    higher = np.subtract.outer(np.asarray(positive), np.asarray(negative))
    return float((higher > 0).mean() + (higher == 0).mean() / 2)


def random_best(values: Sequence[float], drawn: int) -> float:
    """The mean of the largest of so many drawn without replacement, over all draws."""
    largest_first = sorted(values, reverse=True)
    count = len(largest_first)
    if not 1 <= drawn <= count:
        raise ValueError(f"{drawn} drawn of {count}")
    ways = math.comb(count, drawn)
    return sum(math.comb(count - k - 1, drawn - 1) / ways * value for k, value in enumerate(largest_first))


def spearman(x: Sequence[float] | Array, y: Sequence[float] | Array) -> float | None:
    """None where one side does not vary."""
    found = float(weighted_spearman(np.asarray(x, float), np.asarray(y, float), np.ones((1, len(x))))[0])
    return found if math.isfinite(found) else None


def kendall(x: Sequence[float] | Array, y: Sequence[float] | Array) -> float | None:
    """τ-b; None where one side does not vary."""
    found = float(stats.kendalltau(x, y, variant="b").statistic)
    return found if math.isfinite(found) else None


def bootstrapped(pairs: Sequence[tuple[Array, Array]], draws: int, seed: int) -> list[float] | None:
    """The interval of the mean over several (x, y) of Spearman's ρ, things drawn anew, the same in all."""
    count = len(pairs[0][0])
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws).astype(float)
    return percentile_interval(np.mean([weighted_spearman(x, y, weights) for x, y in pairs], axis=0))


def regret(truth: Array, score: Array, among: int) -> float:
    """How far the best of the `among` with the largest scores is behind the best of all; ties by place."""
    order = np.argsort(-score, kind="stable")[:among]
    return float(truth.max() - truth[order].max())
