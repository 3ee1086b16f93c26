"""How far a value can be trusted: what chance gives, and a 95 % interval from groups of rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..linalg import Invariants, permuted_moments
from ..measures import Measure
from ..progress import Progress
from ..results import LEVEL
from ..stats import SMALLEST_GROUP, Alignment, DebiasedAlignment, Grams, Moments, Sample, Shuffle, Statistic
from .pairs import Widths, by_pair

Array = np.ndarray


def as_array(value: Tensor) -> Array:
    return value.detach().cpu().double().numpy()


# What chance gives: values under shuffled pairing, in closed form where it is known, by draws where they are asked for

TIE = 1e-9  # how near a shuffled value counts as equal
TIE_IN_FLOAT32 = 1e-5
FEWEST_DRAWS = round(1 / LEVEL) - 1  # below it p is above the level, whatever the value
LONG = 120.0  # seconds of drawing that are announced


@dataclass(frozen=True)
class Chance:
    """Mean and spread of shuffled values, and how often they come as close as the value itself."""

    null: Array
    spread: Array | None
    p: Array | None = None
    p_search: Array | None = None
    rows: int | None = None  # rows the draws rest on, where they are fewer than those of the value

    def fields(self) -> dict[str, Any]:
        """As `Estimate` has them."""
        return {"null": self.null, "null_spread": self.spread, "p": self.p, "p_search": self.p_search}


def by_formula(measure: Measure, statistic: Statistic) -> Chance | None:
    """Exact mean and spread: over all shuffles for the cosines of Gram matrices; of Gaussian rows from the ranks."""
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
    # These measures are proportional to xy, so that its mean and spread give theirs.
    return Chance(as_array(measure(replace(view, xy=mean))), as_array(measure(replace(view, xy=spread))))


def _invariants(statistic: Moments | Sample, biased: Alignment) -> tuple[Invariants, Invariants]:
    """Of each site's centred Gram matrix; Σ Kᵢᵢ² is what tells the biased from the debiased norm."""
    n, unbiased = statistic.n, statistic.alignment(DebiasedAlignment)
    trace_x, trace_y = statistic.traces[0][:, None], statistic.traces[1][None, :]

    def diagonal(gap: Tensor, trace: Tensor) -> Tensor:
        return (gap + trace.square() / ((n - 1) * (n - 2))) * (n - 2) / n

    return (
        Invariants(trace_x, biased.xx, diagonal(biased.xx - unbiased.xx, trace_x)),
        Invariants(trace_y, biased.yy, diagonal(biased.yy - unbiased.yy, trace_y)),
    )


def by_draws(
    measures: Sequence[Measure],
    statistic: Statistic,
    sample: Sample | None,
    widths: Widths,
    defined: tuple[Array, Array],
    *,
    draws: int,
    seed: int,
) -> dict[str, Chance]:
    """For each measure that depends on the pairing: from shuffles within blocks, or of sampled rows."""
    measures = [m for m in measures if m.paired]
    if isinstance(statistic, Grams):
        return {
            measure.name: judged(
                measure,
                as_array(measure(statistic.alignment(measure.reads))),
                as_array(measure(statistic.alignment(measure.reads, shuffled=True))),
                TIE_IN_FLOAT32,
            )
            for measure in measures
        }
    rows = sample if sample is not None else statistic if isinstance(statistic, Sample) else None
    if rows is None:
        return {}
    fewer = rows.n if rows.n < statistic.n else None
    shuffles = [Shuffle.draw(rows.n, seed, number, rows.xs[0].device) for number in range(draws)]
    values: dict[str, Array] = {}
    drawn: dict[str, Array] = {}
    for measure in measures:
        if issubclass(measure.reads, Alignment):
            values[measure.name] = as_array(measure(rows.alignment(measure.reads)))
            drawn[measure.name] = as_array(measure(rows.shuffled_alignment(measure.reads, shuffles)))
    if others := [m for m in measures if m.name not in values]:
        shape, names = (len(rows.xs), len(rows.ys)), ", ".join(m.name for m in others)
        start = time.monotonic()
        as_they_are = {
            name: as_array(each.matrix(shape)) for name, each in by_pair(others, rows, widths, *defined).items()
        }
        # The first time takes longer than each draw, so this is a bound.
        if (seconds := (time.monotonic() - start) * draws) > LONG:
            warnings.warn(
                f"{draws} draws of {names} may take up to {seconds / 60:.0f} minutes: fewer draws or sites, or "
                "rows='mean', take less",
                stacklevel=2,
            )
        each_draw: dict[str, list[Array]] = {name: [] for name in as_they_are}
        with Progress(f"chance for {names}", draws, "draws") as bar:
            for shuffle in shuffles:
                for name, each in by_pair(others, rows.shuffled(shuffle), widths, *defined).items():
                    each_draw[name].append(as_array(each.matrix(shape)))
                bar.advance()
        values |= as_they_are
        drawn |= {name: np.stack(arrays) for name, arrays in each_draw.items()}
    return {m.name: replace(judged(m, values[m.name], drawn[m.name]), rows=fewer) for m in measures}


def judged(measure: Measure, value: Array, drawn: Array, tie: float = TIE) -> Chance:
    """Mean, spread, and p-values; the observed value counts as one of the draws, so that p is never 0.

    Fewer than `FEWEST_DRAWS` give no p-values: every value would seem to be what chance gives.

    A draw that is nearer to the value than `tie` is as close: the difference may be rounding.

    For the search over all pairs each pair is put on its own scale, and the closest of all pairs is what a value
    has to beat (Westfall and Young's max statistic).
    """
    mean, spread_of_draws = drawn.mean(0), drawn.std(0, ddof=1) if len(drawn) > 1 else None
    if len(drawn) < FEWEST_DRAWS:
        return Chance(mean, spread_of_draws)
    sign = 1.0 if measure.closer == "up" else -1.0
    everything = sign * np.concatenate([value[None], drawn])
    own = everything[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        slack = tie * np.maximum(1, np.abs(own))
        p = (everything >= own - slack).mean(0)
        spread = everything.std(0)
        standard = np.where(spread > slack, (everything - everything.mean(0)) / spread, 0.0)  # 0: all are alike
        closest = np.nanmax(np.where(np.isfinite(standard), standard, -np.inf), axis=(1, 2))
        p_search = (closest[:, None, None] >= standard[0] - 1e-6).mean(0)
        p_search = np.maximum(p_search, p)
    unknown = ~np.isfinite(value) | ~np.isfinite(drawn).all(0)
    for array in (p, p_search):
        array[unknown] = np.nan
    return Chance(mean, spread_of_draws, p, p_search)


# Standard errors: from groups of rows left out in turn, or from halves and quarters of the rows
#
# A delete-one-group jackknife counts what k rows do together k times (Efron and Stein, 1981, Annals of Statistics 9).
# That is nothing to speak of for CKA, but twice the variance for canonical correlations and lists of neighbours.
#
# Two halves have no row in common: half their squared difference is on average exactly the variance with half the rows
# (balanced half-samples: McCarthy, 1969, Review of the International Statistical Institute 37). Quarters give the
# variance with a quarter of them. With a / n + b / n² as its law, that with all rows follows from the two.
#
# Where a few rows weigh much, the standard error is itself uncertain, and the value skewed. Both show in what single
# groups do to the value: kurtosis takes degrees of freedom away, skewness makes the interval longer on one side.

ROUNDING = 1e-6  # of a value: halves that differ by less are as good as equal
HALVED = 32  # groups of rows that halves and quarters are made of: a power of two


@dataclass(frozen=True)
class Error:
    """Standard errors, the degrees of freedom that they were estimated with, and the skewness of the value."""

    size: Array
    freedom: Array
    skewness: Array

    @classmethod
    def of(cls, variance: Array, freedom: float, effects: Array) -> Error:
        """`freedom` is what there is for a Gaussian; `effects` (groups, …): by how much each group raises the value.

        The variance of a variance is 2 / freedom for a Gaussian, and kurtosis / groups more in general (Satterthwaite,
        1946, Biometrics Bulletin 2).
        """
        count = len(effects)
        squares = np.square(effects)  # np.power would take ten times as long
        second, third, fourth = squares.mean(0), (squares * effects).mean(0), np.square(squares).mean(0)
        varies = second > 0  # groups that all do the same have no tails
        with np.errstate(divide="ignore", invalid="ignore"):
            kurtosis = (count + 1) * np.where(varies, fourth / second**2, 0) - 3 * (count - 1)
            skewness = np.where(varies, third / second**1.5, 0)
        kurtosis *= (count - 1) / ((count - 2) * (count - 3))  # the estimate without bias (Joanes and Gill, 1998)
        return cls(np.sqrt(variance), 2 / (2 / freedom + np.maximum(kurtosis, 0) / count), skewness / count**0.5)

    def reach(self, confidence: float) -> tuple[Array, Array]:
        """How far the interval goes down and up: Student's t, and more on the side that the value is skewed to.

        Johnson (1978, Journal of the American Statistical Association 73) shifts the interval by as much. With few
        groups that takes too much away on the other side, so nothing is taken away.
        """
        even = student(self.freedom, confidence) * self.size
        shift = (1 + 2 * student(np.inf, confidence) ** 2) / 6 * self.skewness * self.size
        return even + np.maximum(-shift, 0), even + np.maximum(shift, 0)

    def where(self, holds: Array, other: Error) -> Error:
        """These errors where something holds, elsewhere the others."""
        return Error(*(np.where(holds, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def student(freedom: Array | float, confidence: float) -> Array:
    """How many standard errors an interval goes to either side."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(freedom, (1 + confidence) / 2))


def by_jackknife(left: Array) -> Error:
    """From the values with each group left out (groups, …)."""
    count = len(left)
    effects = left.mean(0) - left
    return Error.of((count - 1) / count * np.square(effects).sum(0), count - 1, effects)


def by_halves(halves: Array, quarters: Array) -> tuple[Error, Array]:
    """From the values of `halves()` (31, 2, …) and `quarters()` (13, 4, …); and where they can be relied on.

    They cannot where quarters differ less than halves, or halves not at all: there the measure saturates with so few
    rows, as canonical correlations do with fewer rows than neurons. Nor where it has no value for so few.
    """
    of_half, of_quarter = (values.var(1, ddof=1).mean(0) for values in (halves, quarters))
    # Each over its rows, as if variances fell with the rows alone: a / n + 2 b / n², and a / n + 4 b / n².
    from_half, from_quarter = of_half / 2, of_quarter / 4
    # An a below 0 is no variance: where quarters ask for one, all is b.
    variance = np.maximum(1.5 * from_half - 0.5 * from_quarter, from_half / 2)
    # The ways to halve are orthogonal, so that their differences give back what each group does.
    signs = np.where(halves_of_groups()[:, 0], 1, -1)
    effects = np.tensordot(signs, halves[:, 0] - halves[:, 1], (0, 0)) / HALVED
    # The two errors add up as if they were independent: 1.5² + 0.5² times the variance of one.
    error = Error.of(variance, len(halves) / 2.5, effects)
    return error, (of_quarter > of_half) & (np.sqrt(of_half) > ROUNDING * np.abs(halves).mean((0, 1)))


def halves_of_groups() -> Array:
    """(31, 2, groups): which groups are in each half, in all the ways that are orthogonal to one another.

    Half-sample u has the groups that have an odd number of bits in common with u: the rows of a Hadamard matrix. So
    the differences of a mean are as many independent contrasts, and its variance is that of the groups' means.
    """
    odd = np.stack([_odd(u) for u in range(1, HALVED)])
    return np.stack([odd, ~odd], axis=1)


def quarters_of_groups() -> Array:
    """(13, 4, groups): which groups are in each quarter, made of two ways to halve and thereby of a third.

    Every way to halve is in one of them at least, and none in more than it must.
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


# How far a value may be off because the rows are a sample: a 95 % interval with Student's t
#
# Cosines of Gram matrices come with each group of rows left out at little cost: a delete-one-group jackknife. What is
# evaluated pair by pair is evaluated on halves and quarters of the rows.
#
# A bootstrap would draw rows twice, and a row beside itself is as alike as can be: it pushes CKA up.

FEWEST_GROUPS = 8  # groups of rows below which a jackknife interval says too little
CONFIDENCE = 0.95
CHEAP = 10**11  # multiply-adds that intervals are worth unless they are asked for


def by_blocks(measure: Measure, statistic: Grams, value: Array) -> tuple[Array | None, Array | None]:
    """From the sums over blocks, which are at hand."""
    groups = statistic.groups
    if int(groups.sum()) < FEWEST_GROUPS:
        return None, None
    left = measure(statistic.alignment(measure.reads, jackknife=True))[groups].cpu().numpy()
    return around(measure, value, by_jackknife(left))


def from_all_rows(measure: Measure, statistic: Statistic) -> Array | None:
    """How far the value from all rows may be from that of blocks (95 %); None where the value is from all rows.

    What single rows do counts in blocks as it does among all rows; what pairs of rows do together is averaged over
    pairs within blocks alone. Its variance falls with the rows of a block, so cutting blocks of b rows in two changes
    the value by as much as putting them together would, but for 1 − b/n: the changes of single groups give its size.
    """
    if not isinstance(statistic, Grams) or statistic.exact or (halves := statistic.halves) is None:
        return None
    groups, kind = statistic.groups, measure.reads
    count = int(groups.sum())
    changes, left = (
        measure(statistic.alignment(kind, jackknife=without)) - measure(halves.alignment(kind, jackknife=without))
        for without in (False, True)
    )
    single = count * changes - (count - 1) * left[groups]  # pseudo-values, which are 0 on average
    size = (single.square().sum(0) * (1 - 1 / statistic.blocks)).sqrt() / count
    return as_array(size) * student(count, CONFIDENCE)


def by_rows(
    measures: Sequence[Measure],
    statistic: Statistic,
    sample: Sample,
    widths: Widths,
    values: dict[str, Array],
    *,
    every: bool,
) -> dict[str, tuple[Array | None, Array | None]]:
    """From the rows themselves; for cosines of Gram matrices, or for every measure."""
    cheap = work(sample) <= CHEAP
    wanted = [m for m in measures if every or (cheap and issubclass(m.reads, Alignment))]
    # A measure that draws rows of its own would draw others for every group.
    wanted = [m for m in wanted if not m.defaults.get("rows", sample.n) < sample.n]
    count = sample.grams.groups
    if not wanted or count < FEWEST_GROUPS:
        return {}
    of_grams = [m for m in wanted if issubclass(m.reads, Alignment)]
    errors = {m.name: by_jackknife(as_array(m(sample.grams.left_out(m.reads)))) for m in of_grams}
    finite = np.any([np.isfinite(values[m.name]) for m in wanted], axis=0)
    defined = [finite.any(axis) for axis in (1, 0)]
    errors |= _pair_by_pair([m for m in wanted if m.name not in errors], sample, widths, defined, count)
    # The sample may hold fewer rows than the value rests on: an error shrinks with the root of the rows.
    shrink = (sample.n / statistic.n) ** 0.5
    return {m.name: around(m, values[m.name], errors[m.name], shrink) for m in wanted}


def _pair_by_pair(
    measures: Sequence[Measure], sample: Sample, widths: Widths, defined: Sequence[Array], count: int
) -> dict[str, Error]:
    """From halves and quarters of the rows; by the jackknife where these are too few rows, which is rather too wide."""

    def evaluated(kept: Array, some: Sequence[Measure]) -> dict[str, Array]:
        """For each measure its values (…, A, B) on the rows of the groups that are kept (…, groups)."""
        parts: dict[str, list[Array]] = {m.name: [] for m in some}
        flat, group = kept.reshape(-1, kept.shape[-1]), np.arange(sample.n) % kept.shape[-1]
        with Progress(f"intervals for {', '.join(parts)}", len(flat), "parts of the rows") as bar:
            for groups in flat:
                part = sample.without(torch.from_numpy(np.flatnonzero(~groups[group])))
                for name, each in by_pair(some, part, widths, defined[0], defined[1]).items():
                    parts[name].append(as_array(each.matrix((len(part.xs), len(part.ys)))))
                bar.advance()
        stacked = {name: np.stack(values) for name, values in parts.items()}
        return {name: values.reshape(*kept.shape[:-1], *values.shape[1:]) for name, values in stacked.items()}

    if not measures:
        return {}
    errors: dict[str, tuple[Error, Array]] = {}
    if sample.n >= HALVED * SMALLEST_GROUP:
        halves, quarters = (evaluated(kept, measures) for kept in (halves_of_groups(), quarters_of_groups()))
        errors = {m.name: by_halves(halves[m.name], quarters[m.name]) for m in measures}
    doubtful = [m for m in measures if m.name not in errors or not errors[m.name][1].all()]
    left = evaluated(~np.eye(count, dtype=bool), doubtful) if doubtful else {}
    jackknifed = {name: by_jackknife(values) for name, values in left.items()}
    sure = {name: error.where(holds, jackknifed.get(name, error)) for name, (error, holds) in errors.items()}
    return jackknifed | sure


def work(sample: Sample) -> int:
    """Multiply-adds that intervals of cosines of Gram matrices take."""
    p, q = (sum(widths) for widths in sample.widths)
    return sample.n * min(p * q, sample.n * (p + q))


def around(measure: Measure, value: Array, error: Error, shrink: float = 1.0) -> tuple[Array, Array]:
    """The interval about a value, from its standard error."""
    below, above = error.reach(CONFIDENCE)
    low, high = value - below * shrink, value + above * shrink
    bottom, top = measure.bounds
    # An interval may end at a bound of the measure, since no value lies beyond; the value itself is not touched.
    return (
        low if bottom is None else np.maximum(low, bottom),
        high if top is None else np.minimum(high, top),
    )
