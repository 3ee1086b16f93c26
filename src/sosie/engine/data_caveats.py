"""Doubts about the data: one direction, one row or one mean may decide what a measure says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..linalg import row_squares, self_product
from ..measures import Measure
from ..results import Caveat, Side
from ..stats import Alignment, Covariances, Grams, PairViews, Sample, Statistic

ONE_DIRECTION = 0.8  # Σλ² / (Σλ)² above which a single direction holds some nine tenths of the variance
ONE_ROW = 0.5  # share of the squared Gram matrix that a single row may make up
HARDLY = 1e-6  # Σ‖x − mean‖² / Σ‖x‖² below which features hardly vary
MANY_NEIGHBOURS = 0.1  # share of the rows that k neighbours may be
WORK = 10**9  # multiply-adds that looking at single rows of a site is worth


def of_one_direction(
    measure: Measure, statistic: Statistic | PairViews, side_a: Side, side_b: Side
) -> Iterator[Caveat]:
    """Measures that weigh directions by their variance see little else than the one that has it all."""
    if "linear" in measure.invariant or not issubclass(measure.reads, (Alignment, Covariances)) or statistic.n < 4:
        return
    shares = [own / trace.square() for own, trace in zip(statistic.own, statistic.traces, strict=True)]
    text = "one direction holds about {:.0%} of the variance, and decides the value"
    yield from _at(shares, side_a, side_b, lambda share: share > ONE_DIRECTION, lambda s: text.format(s**0.5))


def of_one_row(
    measure: Measure, statistic: Statistic, rows: Sample | None, side_a: Side, side_b: Side
) -> Iterator[Caveat]:
    """An outlier can make up most of a Gram matrix, and then CKA is about that row."""
    if not issubclass(measure.reads, Alignment):
        return
    shares: Iterable[Tensor]
    if isinstance(statistic, Grams):
        shares = statistic.heaviest_row
    elif rows is not None:
        known = rows.grams.heaviest
        shares = known or [torch.stack([_heaviest(site) for site in side]) for side in (rows.xs, rows.ys)]
    else:
        return
    text = "one row makes up {:.0%} of the Gram matrix: without it the value may be another"
    yield from _at(shares, side_a, side_b, lambda share: share > ONE_ROW, text.format)


def of_hardly_varying(statistic: Statistic, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    text = "features hardly vary: by {:.1g} of their size, so that rounding in the network may be what is compared"
    few = statistic.spread
    yield from _at(few, side_a, side_b, lambda s: 0 < s < HARDLY, lambda s: text.format(s**0.5))


def of_neighbours(measure: Measure, statistic: Statistic) -> Iterator[Caveat]:
    k = measure.defaults.get("k")
    if isinstance(k, int) and k > MANY_NEIGHBOURS * (statistic.n - 1):
        by_chance = min(1.0, k / (statistic.n - 1))
        yield Caveat(f"k={k} neighbours of n={statistic.n} rows: {by_chance:.0%} of all are neighbours by chance")


def _heaviest(site: Tensor) -> Tensor:
    """The largest share that one row has in ‖K‖², by way of the smaller of K and the covariance."""
    n, width = site.shape
    if n * width * min(n, width) > WORK:
        return torch.zeros((), device=site.device)
    x = site.float() - site.mean(0, dtype=torch.float64).float()
    x = x / x.abs().amax()  # a share is wanted, and fourth powers would overflow
    rows = ((x @ self_product(x)) * x).sum(1) if width <= n else self_product(x.T).square().sum(1)
    return ((2 * rows - row_squares(x).square()) / rows.sum()).amax()


def _at(
    shares: Iterable[Tensor],
    side_a: Side,
    side_b: Side,
    doubtful: Callable[[float], bool],
    words: Callable[[float], str],
) -> Iterator[Caveat]:
    """A caveat for each site whose share is doubtful."""
    found_a, found_b = (share.detach().cpu().tolist() for share in shares)
    for site, share in zip(side_a.sites, found_a, strict=True):
        if doubtful(share):
            yield Caveat(words(share), site_a=site)
    for site, share in zip(side_b.sites, found_b, strict=True):
        if doubtful(share):
            yield Caveat(words(share), site_b=site)
