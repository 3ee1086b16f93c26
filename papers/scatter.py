"""Intervals of what a run measured, from the scatter that its results hold: seeds, pairs, clients, bootstraps.

`papers/<name>/intervals.py` has `intervals(read)`, where `read("figure-2")` is what results/figure-2.json holds, or an
empty dictionary. It returns an Interval for each number whose scatter is there; a number without one stays without.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95
SEEN = (1.960 + 0.842) / 1.960  # of the half width: what four studies in five would tell from nothing

Read = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Interval:
    """95 %, and over what: "10 pairs of networks"."""

    low: float
    high: float
    of: str
    units: int | None = None  # how many of them, where more would narrow it by the root of their number

    @property
    def smallest_effect(self) -> float:
        """The smallest difference from a bound that so much scatter would show, in four studies of five."""
        return SEEN * (self.high - self.low) / 2


Found = dict[str, Interval | None]


def reader(results: Path) -> Read:
    def read(experiment: str) -> dict[str, Any]:
        path = results / f"{experiment}.json"
        found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        return found

    return read


def of_mean(values: Iterable[float], of: str, *, sharing: float = 1.0) -> Interval | None:
    """Student's t; `sharing`: by how much the variance is larger than that of independent values."""
    kept = np.array([value for value in values if value is not None], dtype=float)
    if len(kept) < 2:
        return None
    return of_summary(float(kept.mean()), float(kept.std(ddof=1)) * math.sqrt(sharing), len(kept), of)


def of_summary(mean: float, sd: float, number: int, of: str) -> Interval | None:
    if number < 2 or not math.isfinite(sd):
        return None
    half = float(stats.t.ppf((1 + LEVEL) / 2, number - 1)) * sd / math.sqrt(number)
    return Interval(mean - half, mean + half, f"{number} {of}", number)


def of_error(value: float | None, error: float | None, of: str, units: int | None = None) -> Interval | None:
    """From a standard error: by Student's t where it comes from so few units."""
    if value is None or error is None:
        return None
    half = float(stats.t.ppf((1 + LEVEL) / 2, units - 1 if units else math.inf)) * error
    return Interval(value - half, value + half, of, units)


def of_share(share: float, number: int, of: str, *, times: float = 1.0) -> Interval:
    """Wilson's interval of a share; `times` the number for a count."""
    found = stats.binomtest(round(share * number), number).proportion_ci(LEVEL, method="wilson")
    return Interval(times * float(found.low), times * float(found.high), f"{number} {of}", number)


def of_correlation(r: float, number: int, of: str) -> Interval | None:
    """Fisher's z."""
    if number < 4 or not abs(r) < 1:
        return None
    half = float(stats.norm.ppf((1 + LEVEL) / 2)) / math.sqrt(number - 3)
    z = math.atanh(r)
    return Interval(math.tanh(z - half), math.tanh(z + half), f"{number} {of}", number)


def of_spread(sd: float, number: int, of: str) -> Interval | None:
    """Of a standard deviation, by the chi-square distribution."""
    if number < 2:
        return None
    low, high = (sd * math.sqrt((number - 1) / stats.chi2.ppf(q, number - 1)) for q in (0.975, 0.025))
    return Interval(float(low), float(high), f"{number} {of}", number)


def of_spread_ratio(ratio: float, above: int, below: int, of: str) -> Interval:
    """Of the ratio of two standard deviations, by the F distribution."""
    low, high = (ratio / math.sqrt(stats.f.ppf(q, above - 1, below - 1)) for q in (0.975, 0.025))
    return Interval(float(low), float(high), of, min(above, below))


def of_resampled(
    units: Sequence[Any], statistic: Callable[[list[Any]], float], of: str, draws: int = 2000
) -> Interval | None:
    """Percentiles of a bootstrap over units, always with the same draws."""
    if len(units) < 3:
        return None
    random = np.random.default_rng(0)
    drawn = [statistic([units[k] for k in random.integers(len(units), size=len(units))]) for _ in range(draws)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(float(low), float(high), f"{len(units)} {of}", len(units))


def held(pair: Sequence[float] | None, of: str, units: int | None = None) -> Interval | None:
    """An interval that the results hold already."""
    return None if pair is None or None in pair else Interval(float(pair[0]), float(pair[1]), of, units)


def of_difference(one: Interval | None, other: Interval | None, difference: float) -> Interval | None:
    """Of two numbers that were measured apart: half widths add as squares."""
    if one is None or other is None:
        return None
    half = math.hypot((one.high - one.low) / 2, (other.high - other.low) / 2)
    return Interval(difference - half, difference + half, one.of, one.units)
