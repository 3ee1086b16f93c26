"""Is there a difference? Arms trained from the same seeds, compared seed by seed, and as if unrelated."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import integrate, optimize, stats

LEVEL, POWER = 0.05, 0.8
Values = Mapping[int, float]  # by seed


def compare_arms(arms: Mapping[str, Values], baseline: str) -> dict[str, Any]:
    """Mean and spread of each arm, and its difference to the baseline; p-values are corrected together."""
    differences = {name: difference(values, arms[baseline]) for name, values in arms.items() if name != baseline}
    tested = [name for name, found in differences.items() if found["p"] is not None]
    corrected = holm([differences[name]["p"] for name in tested])
    for found in differences.values():
        found["p_holm"] = None
    for name, p in zip(tested, corrected, strict=True):
        differences[name]["p_holm"] = p
    return {"baseline": baseline, "arms": {name: summary(v) for name, v in arms.items()}, "differences": differences}


def summary(values: Values) -> dict[str, Any]:
    each = list(values.values())
    return {"mean": float(np.mean(each)) if each else None, "sd": spread(each), "seeds": dict(values)}


def spread(each: Sequence[float]) -> float | None:
    return float(np.std(each, ddof=1)) if len(each) > 1 else None


def difference(values: Values, baseline: Values) -> dict[str, Any]:
    """Of the means of the seeds that both have; paired, with a 95 % interval, and Welch's, which does not pair.

    `detectable` is the smallest true difference that so many pairs of so much spread would find (two-sided 5 %, in four
    of five studies). With one seed there is a difference and nothing else.
    """
    seeds = sorted(set(values) & set(baseline))
    if not seeds:
        return dict.fromkeys(("difference", "sd", "low", "high", "p", "welch", "detectable"), None) | {"pairs": 0}
    a, b = np.array([values[seed] for seed in seeds]), np.array([baseline[seed] for seed in seeds])
    each = a - b
    found: dict[str, Any] = {
        "difference": float(each.mean()), "pairs": len(seeds), "sd": spread(each), "low": None, "high": None, "p": None,
        "welch": None, "detectable": None,
    }  # fmt: skip
    if not found["sd"]:  # one pair, or pairs that all differ by the same: nothing to estimate a spread from
        return found
    half = float(stats.t.ppf(1 - LEVEL / 2, len(each) - 1)) * found["sd"] / math.sqrt(len(each))
    found.update(low=found["difference"] - half, high=found["difference"] + half, p=float(stats.ttest_rel(a, b).pvalue))
    found["welch"] = welch(a, b)
    found["detectable"] = detectable_effect(len(each)) * found["sd"]
    return found


def welch(a: np.ndarray, b: np.ndarray) -> dict[str, float] | None:
    if not (a.var() or b.var()):
        return None
    test = stats.ttest_ind(a, b, equal_var=False)
    interval = test.confidence_interval(1 - LEVEL)
    return {"low": float(interval.low), "high": float(interval.high), "p": float(test.pvalue), "df": float(test.df)}


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the k-th smallest of m is multiplied by m − k + 1, never below the one before."""
    order = np.argsort(p)
    corrected, before = [0.0] * len(p), 0.0
    for rank, k in enumerate(order):
        before = max(before, min(1.0, (len(p) - rank) * p[k]))
        corrected[k] = before
    return corrected


def power(effect: float, pairs: int) -> float:
    """Chance that a two-sided paired t-test finds a difference of so many standard deviations (of the differences).

    The noncentral t distribution, integrated over the spread that is estimated: scipy's own is no number for two pairs.
    """
    df, shift = pairs - 1, effect * math.sqrt(pairs)
    edge = float(stats.t.ppf(1 - LEVEL / 2, df)) / math.sqrt(df)

    def found(chi: float) -> float:
        return float(
            stats.chi.pdf(chi, df) * (stats.norm.cdf(shift - edge * chi) + stats.norm.cdf(-shift - edge * chi))
        )

    return float(integrate.quad(found, 0, stats.chi.isf(1e-12, df), limit=200)[0])


@functools.cache
def detectable_effect(pairs: int) -> float:
    """In standard deviations of the differences; no less than two pairs."""
    if pairs < 2:
        raise ValueError(f"{pairs} pair has no spread: at least two seeds are needed")
    return float(optimize.brentq(lambda effect: power(effect, pairs) - POWER, 1e-6, 20.0))
