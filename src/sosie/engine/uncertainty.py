"""The uncertainty of a value: what chance gives, and a 95 % interval from groups of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ..linalg import Invariants, permuted_moments
from ..measures import Measure, as_array
from ..results import LEVEL, Chance, Interval
from ..stats import Alignment, DebiasedAlignment, Grams, Moments, Sample, Statistic

Array = np.ndarray


# Chance: values under shuffled pairing, in closed form where one is known, by draws on request

TIE = 1e-9  # differences up to which a shuffled value counts as equal
TIE_IN_FLOAT32 = 1e-5
FEWEST_DRAWS = round(1 / LEVEL) - 1  # with fewer, p is above the level whatever the value


def by_formula(measure: Measure, statistic: Statistic) -> Chance | None:
    """The exact mean and spread: over all shuffles for cosines of Gram matrices; of Gaussian rows from the ranks."""
    if statistic.n < 4:
        return None
    if measure.by_chance is not None and not isinstance(statistic, Grams):
        ranks_a, ranks_b = ([int(scatter.rank) for scatter in side] for side in statistic.scatters)
        moments = np.array([[measure.by_chance(statistic.n, r, s) for s in ranks_b] for r in ranks_a])
        return Chance(moments[..., 0], moments[..., 1])
    if measure.reads is DebiasedAlignment:
        view = statistic.alignment(DebiasedAlignment)
        mean = torch.zeros_like(view.xy)
        if isinstance(statistic, Grams):
            spread = statistic.variance.sqrt() * (statistic.n * (statistic.n - 3) / statistic.pairs.sum())
        else:
            spread = (view.xx * view.yy * 2 / (statistic.n * (statistic.n - 3))).sqrt()
    elif measure.reads is Alignment and not isinstance(statistic, Grams):
        view = statistic.alignment(Alignment)
        x, y = _invariants(statistic, view)
        mean, variance = permuted_moments(x, y, statistic.n)
        spread = variance.sqrt()
    else:
        return None
    # These measures are proportional to xy, so their mean and spread follow from those of xy.
    return Chance(as_array(measure(replace(view, xy=mean))), as_array(measure(replace(view, xy=spread))))


def _invariants(statistic: Moments | Sample, biased: Alignment) -> tuple[Invariants, Invariants]:
    """The invariants of each site's centred Gram matrix; Σ Kᵢᵢ² follows from the biased and the debiased norm."""
    n, unbiased = statistic.n, statistic.alignment(DebiasedAlignment)
    trace_x, trace_y = statistic.traces[0][:, None], statistic.traces[1][None, :]

    def diagonal(gap: Tensor, trace: Tensor) -> Tensor:
        return (gap + trace.square() / ((n - 1) * (n - 2))) * (n - 2) / n

    return (
        Invariants(trace_x, biased.xx, diagonal(biased.xx - unbiased.xx, trace_x)),
        Invariants(trace_y, biased.yy, diagonal(biased.yy - unbiased.yy, trace_y)),
    )


def judged(measure: Measure, value: Array, drawn: Array, tie: float = TIE) -> Chance:
    """The mean and spread of the draws, and p-values; the value counts as one of the draws, so p is never 0.

    Fewer draws than `FEWEST_DRAWS` give no p-values, since none could reach the level. A draw within `tie` of the value
    counts as equal, since the difference may be rounding. For the search over all pairs, each pair is standardised
    and a value is compared with the closest of all pairs (Westfall and Young's max statistic).
    """
    mean, spread_of_draws = drawn.mean(0), drawn.std(0, ddof=1) if len(drawn) > 1 else None
    if len(drawn) < FEWEST_DRAWS:
        return Chance(mean, spread_of_draws)
    sign = 1.0 if measure.closer == "up" else -1.0
    everything = sign * np.concatenate([value[None], drawn])
    observed = everything[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        slack = tie * np.maximum(1, np.abs(observed))
        p = (everything >= observed - slack).mean(0)
        spread = everything.std(0)
        standard = np.where(spread > slack, (everything - everything.mean(0)) / spread, 0.0)  # 0: all are equal
        closest = np.nanmax(np.where(np.isfinite(standard), standard, -np.inf), axis=(1, 2))
        p_search = (closest[:, None, None] >= standard[0] - 1e-6).mean(0)
        p_search = np.maximum(p_search, p)
    unknown = ~np.isfinite(value) | ~np.isfinite(drawn).all(0)
    for array in (p, p_search):
        array[unknown] = np.nan
    return Chance(mean, spread_of_draws, p, p_search, p_floor=1 / len(everything))


# Standard errors: from groups of rows left out in turn, or from halves and quarters of the rows
#
# A delete-one-group jackknife counts joint effects of k rows k times (Efron and Stein, 1981, Annals of Statistics 9).
# That is negligible for CKA, but doubles the variance of canonical correlations and lists of neighbours.
#
# Two halves have no row in common: half their squared difference is on average exactly the variance with half the rows
# (balanced half-samples: McCarthy, 1969, Review of the International Statistical Institute 37). Quarters give the
# variance with a quarter of them. If it is a / n + b / n², the variance with all rows follows from the two.
#
# If a few rows have large effects, the standard error is itself uncertain, and the value is skewed. Both show in the
# effects of single groups: kurtosis reduces the degrees of freedom, skewness makes the interval longer on one side.

ROUNDING = 1e-6  # of a value: halves that differ by less count as equal
HALVED = 32  # groups of rows in halves and quarters: a power of two


@dataclass(frozen=True)
class Error:
    """Standard errors, their degrees of freedom, and the skewness of the value."""

    size: Array
    freedom: Array
    skewness: Array

    @classmethod
    def of(cls, variance: Array, freedom: float, effects: Array) -> Error:
        """An error from a variance; `freedom`: for a Gaussian; `effects` (groups, …): how much each group adds.

        The variance of a variance is 2 / freedom for a Gaussian, and kurtosis / groups more in general (Satterthwaite,
        1946, Biometrics Bulletin 2).
        """
        count = len(effects)
        squares = np.square(effects)  # np.power would take ten times as long
        second, third, fourth = squares.mean(0), (squares * effects).mean(0), np.square(squares).mean(0)
        varies = second > 0  # groups of equal effect have no tails
        with np.errstate(divide="ignore", invalid="ignore"):
            kurtosis = (count + 1) * np.where(varies, fourth / second**2, 0) - 3 * (count - 1)
            skewness = np.where(varies, third / second**1.5, 0)
        kurtosis *= (count - 1) / ((count - 2) * (count - 3))  # the estimate without bias (Joanes and Gill, 1998)
        return cls(np.sqrt(variance), 2 / (2 / freedom + np.maximum(kurtosis, 0) / count), skewness / count**0.5)

    def reach(self, confidence: float) -> tuple[Array, Array]:
        """The reach of the interval down and up: Student's t, and more on the side that the value is skewed to.

        Johnson (1978, Journal of the American Statistical Association 73) shifts both ends. With few groups that makes
        the other side too short, so here it keeps its length.
        """
        even = student(self.freedom, confidence) * self.size
        shift = (1 + 2 * student(np.inf, confidence) ** 2) / 6 * self.skewness * self.size
        return even + np.maximum(-shift, 0), even + np.maximum(shift, 0)

    def where(self, condition: Array, other: Error) -> Error:
        """As `numpy.where`: these errors where the condition is true, elsewhere the others."""
        return Error(*(np.where(condition, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def student(freedom: Array | float, confidence: float) -> Array:
    """The standard errors that an interval reaches to either side."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(freedom, (1 + confidence) / 2))


def by_jackknife(left: Array) -> Error:
    """The error, from the values with each group left out (groups, …)."""
    count = len(left)
    effects = left.mean(0) - left
    return Error.of((count - 1) / count * np.square(effects).sum(0), count - 1, effects)


def by_halves(halves: Array, quarters: Array) -> tuple[Error, Array]:
    """The error, from the values on halves (31, 2, …) and on quarters (13, 4, …); and where it is reliable.

    It is not where quarters differ less than halves, or halves not at all: there the measure saturates with so few
    rows, as canonical correlations do with fewer rows than neurons. Nor where it has no value for so few.
    """
    of_half, of_quarter = (values.var(1, ddof=1).mean(0) for values in (halves, quarters))
    # Each over its rows, as if variances fell with the rows alone: a / n + 2 b / n², and a / n + 4 b / n².
    from_half, from_quarter = of_half / 2, of_quarter / 4
    # An a below 0 is not a variance: then all is b.
    variance = np.maximum(1.5 * from_half - 0.5 * from_quarter, from_half / 2)
    # The ways to halve are orthogonal, so their differences give the effect of each group.
    signs = np.where(halves_of_groups()[:, 0], 1, -1)
    effects = np.tensordot(signs, halves[:, 0] - halves[:, 1], (0, 0)) / HALVED
    # The two errors add up as if they were independent: 1.5² + 0.5² times the variance of one.
    error = Error.of(variance, len(halves) / 2.5, effects)
    return error, (of_quarter > of_half) & (np.sqrt(of_half) > ROUNDING * np.abs(halves).mean((0, 1)))


def halves_of_groups() -> Array:
    """(31, 2, groups): the groups in each half, for all orthogonal ways to halve them.

    Half-sample u has the groups that share an odd number of bits with u: the rows of a Hadamard matrix. So the
    differences of a mean are independent contrasts, and its variance is that of the groups' means.
    """
    odd = np.stack([_odd(u) for u in range(1, HALVED)])
    return np.stack([odd, ~odd], axis=1)


def quarters_of_groups() -> Array:
    """(13, 4, groups): the groups in each quarter, from two ways to halve, which imply a third.

    Every way to halve is used at least once, and as rarely as possible.
    """
    quarters = []
    uses = np.zeros(HALVED, dtype=int)
    while 0 in uses[1:]:
        u = 1 + int(np.argmin(uses[1:]))
        v = min((v for v in range(1, HALVED) if v != u), key=lambda v: (uses[v] + uses[u ^ v], v))
        uses[[u, v, u ^ v]] += 1
        a, b = _odd(u), _odd(v)
        quarters.append([a & b, a & ~b, ~a & b, ~a & ~b])
    return np.array(quarters)


def _odd(u: int) -> Array:
    return np.array([(u & group).bit_count() % 2 == 1 for group in range(HALVED)])


# A 95 % interval with Student's t, since the rows are a sample
#
# Cosines of Gram matrices are cheap with each group of rows left out: a delete-one-group jackknife. Measures that are
# evaluated pair by pair are evaluated on halves and quarters of the rows.
#
# A bootstrap would draw rows twice, and a row is as alike as can be to itself, which raises CKA.

FEWEST_GROUPS = 8  # groups of rows below which there is no jackknife interval
CONFIDENCE = 0.95


def by_blocks(measure: Measure, statistic: Grams, value: Array) -> Interval:
    """The interval from the sums over blocks."""
    groups = statistic.groups
    if int(groups.sum()) < FEWEST_GROUPS:
        return None, None
    left = measure(statistic.alignment(measure.reads, jackknife=True))[groups]
    return around(measure, value, by_jackknife(as_array(left)))


def from_all_rows(measure: Measure, statistic: Statistic) -> Array | None:
    """How far the value from all rows may be from that of blocks (95 %); None if the value is from all rows.

    The effects of single rows are the same in blocks as among all rows; the joint effects of pairs are averaged over
    pairs within blocks only. Their variance falls with the rows of a block, so cutting blocks of b rows in two changes
    the value by as much as joining them would, up to 1 − b/n: the changes of single groups give the size.
    """
    if not isinstance(statistic, Grams) or statistic.exact or statistic.halves is None:
        return None
    return as_array(block_deviation(measure, statistic)) * student(int(statistic.groups.sum()), CONFIDENCE)


def block_deviation(measure: Measure, statistic: Grams) -> Tensor:
    """The standard deviation of the value from blocks about that from all rows; see `from_all_rows`."""
    groups, kind, halves = statistic.groups, measure.reads, statistic.halves
    assert halves is not None
    count = int(groups.sum())
    changes, left = (
        measure(statistic.alignment(kind, jackknife=without)) - measure(halves.alignment(kind, jackknife=without))
        for without in (False, True)
    )
    single = count * changes - (count - 1) * left[groups]  # pseudo-values, which are 0 on average
    return (single.square().sum(0) * (1 - 1 / statistic.blocks)).sqrt() / count


def of_share(share: float, n: float) -> tuple[float, float]:
    """Clopper and Pearson's exact interval for a share of n independent inputs, which holds at 0 and 1 too.

    n may be what a clustered sample is worth (Korn and Graubard, 1998, Survey Methodology 24).
    """
    from scipy.special import betaincinv

    tail, some = (1 - CONFIDENCE) / 2, share * n
    low = 0.0 if share == 0 else float(betaincinv(some, n - some + 1, tail))
    high = 1.0 if share == 1 else float(betaincinv(some + 1, n - some, 1 - tail))
    return low, high


def of_clustered_share(share: float, n: int, clusters: int, without: Array) -> tuple[float, float]:
    """The exact interval for what n predictions in clusters, such as the tokens of inputs, are worth.

    `without`: (G,) the share without each group of clusters. Where all predictions count, or none, the interval is that
    of as many predictions as there are clusters: those of a cluster may all go together.
    """
    worth = float(clusters)
    if 0 < share < 1 and n > clusters and len(without) >= FEWEST_GROUPS:
        error = by_jackknife(without)
        ratio = student(math.inf, CONFIDENCE) / student(error.freedom, CONFIDENCE) / error.size
        worth = min(n, share * (1 - share) * float(ratio) ** 2)
    return of_share(share, worth)


def around(measure: Measure, value: Array, error: Error, shrink: float = 1.0) -> tuple[Array, Array]:
    """The interval around a value, from its standard error."""
    below, above = error.reach(CONFIDENCE)
    low, high = value - below * shrink, value + above * shrink
    bottom, top = measure.bounds
    # No value lies beyond a bound of the measure, so the interval may end there; the value itself stays as it is.
    return (
        low if bottom is None else np.maximum(low, bottom),
        high if top is None else np.minimum(high, top),
    )
