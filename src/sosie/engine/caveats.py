"""Doubts in words, by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..measures import Measure
from ..results import Caveat, Side
from ..stats import DebiasedAlignment, Grams, Sample, Statistic


def of_constants(
    statistic: Statistic, side_a: Side, side_b: Side, constant_a: np.ndarray, constant_b: np.ndarray
) -> Iterator[Caveat]:
    where = f" within blocks of {statistic.block} rows" if isinstance(statistic, Grams) and not statistic.exact else ""
    text = f"features do not vary{where}: no similarity is defined"
    for site, constant in zip(side_a.sites, constant_a, strict=True):
        if constant:
            yield Caveat(text, site_a=site)
    for site, constant in zip(side_b.sites, constant_b, strict=True):
        if constant:
            yield Caveat(text, site_b=site)


def of_undefined(undefined: dict[tuple[int, int], str], side_a: Side, side_b: Side) -> Iterator[Caveat]:
    for (i, j), reason in undefined.items():
        yield Caveat(f"undefined: {reason}", side_a.sites[i], side_b.sites[j])


def of_widths(measure: Measure, statistic: Statistic, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    """Too few rows for the width, in the way that concerns this measure."""
    n, few = statistic.n, measure.few_rows
    if few == "biased":
        yield from _per_site(side_a, side_b, lambda w: f"n={n} < width={w}: biased {measure.closer}" if n < w else None)
    elif few == "saturates":
        yield from _per_site(
            side_a,
            side_b,
            lambda w: f"n={n} rows for width={w}: correlations of full-rank features are all 1" if w >= n - 1 else None,
        )
    elif few == "saturates in x":
        for site, width in zip(side_a.sites, side_a.widths, strict=True):
            if width >= n - 1:
                yield Caveat(f"n={n} rows for width={width}: the regression fits anything", site_a=site)


def of_statistic(measure: Measure, statistic: Statistic) -> Iterator[Caveat]:
    """What the statistic leaves out."""
    if isinstance(statistic, Grams) and not statistic.exact and measure.reads is not DebiasedAlignment:
        yield Caveat(f"estimated from blocks of {statistic.block} rows; exact=True gives the whole-data value")
    if isinstance(statistic, Sample) and not statistic.exact:
        yield Caveat(f"rests on {statistic.describe()}")


def of_offsets(side_a: Side, side_b: Side, strained: dict[tuple[str, str], float]) -> Iterator[Caveat]:
    """Means so far off that products in float32 lost digits before it was noticed."""
    text = "the mean of some rows is large against their spread: digits may be lost; precision='float64' keeps them"
    for source, site in strained:
        if source == side_a.name and site in side_a.sites:
            yield Caveat(text, site_a=site)
        if source == side_b.name and site in side_b.sites:
            yield Caveat(text, site_b=site)


def of_nan(value: np.ndarray, explained: list[Caveat], side_a: Side, side_b: Side) -> Iterator[Caveat]:
    """No NaN without a reason: one that no other rule explains comes from a denominator of zero."""
    for i, j in zip(*np.nonzero(np.isnan(value)), strict=True):
        site_a, site_b = side_a.sites[i], side_b.sites[j]
        if not any(caveat.concerns(site_a, site_b) and _explains(caveat) for caveat in explained):
            yield Caveat(
                "undefined: nothing of one side is left to compare (its centred Gram matrix is zero)", site_a, site_b
            )


def _explains(caveat: Caveat) -> bool:
    return caveat.text.startswith(("undefined", "features do not vary"))


def of_bounds(measure: Measure, value: np.ndarray) -> Iterator[Caveat]:
    low, high = measure.bounds
    outside = np.zeros_like(value, dtype=bool)
    if low is not None:
        outside |= value < low
    if high is not None:
        outside |= value > high
    if outside.any():
        worst = value[outside][0]
        yield Caveat(f"{int(outside.sum())} values lie outside [{low}, {high}] by more than rounding, e.g. {worst:.6g}")


def _per_site(side_a: Side, side_b: Side, rule: Callable[[int], str | None]) -> Iterator[Caveat]:
    for site, width in zip(side_a.sites, side_a.widths, strict=True):
        if text := rule(width):
            yield Caveat(text, site_a=site)
    for site, width in zip(side_b.sites, side_b.widths, strict=True):
        if text := rule(width):
            yield Caveat(text, site_b=site)
