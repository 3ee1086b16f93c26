"""From statistics to values: every measure over every pair of sites, with interval, chance and caveats."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..linalg import side_by_side
from ..measures import Measure, as_array, snap_to_bounds
from ..progress import Progress, track
from ..results import Array, Caveat, Chance, Estimate, Interval, Side
from ..stats import Collected, Statistic
from ..stats.grams import Grams
from ..stats.moments import Moments
from ..stats.row_grams import SMALLEST_GROUP
from ..stats.sample import Sample
from ..stats.sampling import Shuffle, dealt_evenly
from ..stats.splits import SplitMoments, Splits
from ..stats.views import Alignment, Covariances, Neurons, PairedRows, PairViews
from . import caveats
from .plan import Widths
from .uncertainty import (
    FEWEST_GROUPS,
    HALVED,
    TIE_IN_FLOAT32,
    Error,
    around,
    by_blocks,
    by_formula,
    by_halves,
    by_jackknife,
    from_all_rows,
    halves_of_groups,
    judged,
    quarters_of_groups,
)

CONSTANT = {"float64": 1e-24}  # share of Σ‖x‖² that rounding alone can give a constant feature
CONSTANT_IN_FLOAT32 = 1e-12
LONG = 120.0  # seconds of draws above which a warning says how long they take
UNDEFINED = ValueError, ImportError, torch.linalg.LinAlgError, np.linalg.LinAlgError  # what says that there is no value
CHEAP = 10**11  # multiply-adds up to which intervals are computed unasked


def evaluate(
    measures: Sequence[Measure],
    statistic: Collected,
    side_a: Side,
    side_b: Side,
    *,
    sample: Sample | None,
    draws: int,
    seed: int,
    interval: bool,
    correlated: Caveat | None,
    order_samples: tuple[Sample | None, Sample | None],
) -> dict[str, Estimate]:
    """The estimates of measures that read one statistic, (sites of A, sites of B) each.

    `sample` holds rows for intervals and chance if the statistic has none. p-values come from `draws` shuffles;
    `interval` computes intervals even where they take long. Rows that are `correlated`, such as the positions of
    one input, have neither interval nor chance. `order_samples` tell whether the order of the rows matters to blocks.
    """
    if not measures:
        return {}
    source, described = statistic, statistic.describe()
    if isinstance(statistic, SplitMoments):  # chance, intervals and caveats rest on all rows
        statistic = statistic.total
    elif isinstance(statistic, Moments):
        source = statistic = statistic.beside(sample)
    rows = statistic if isinstance(statistic, Sample) else sample
    sides, widths = (side_a, side_b), (side_a.widths, side_b.widths)
    constant_a, constant_b = map(constant_sites, statistic.spread, sides)
    defined = (~constant_a, ~constant_b)
    pairs = by_pair([m for m in measures if not issubclass(m.reads, Alignment)], source, widths, *defined)
    digits = torch.float64 if {*side_a.dtypes, *side_b.dtypes} == {"float64"} else torch.float32
    values = {}
    for measure in measures:
        if measure.name in pairs:
            matrix = pairs[measure.name].matrix((len(side_a.sites), len(side_b.sites)))
        else:
            matrix = measure(statistic.alignment(measure.reads))
        values[measure.name] = array = as_array(snap_to_bounds(matrix, measure, digits)).copy()
        array[constant_a, :] = array[:, constant_b] = np.nan

    chance: dict[str, Chance] = {}
    intervals: dict[str, Interval] = {}
    if correlated is None:
        if draws:
            chance = by_draws(measures, statistic, rows, widths, defined, draws=draws, seed=seed)
        for measure in measures:  # the mean and spread of a formula are exact
            if (formula := by_formula(measure, statistic)) is not None:
                drawn = chance.get(measure.name, formula)
                chance[measure.name] = replace(drawn, mean=formula.mean, spread=formula.spread)
        if isinstance(statistic, Grams):
            intervals = {m.name: by_blocks(m, statistic, values[m.name]) for m in measures}
        elif rows is not None and rows.n >= 4:
            intervals = by_rows(measures, statistic, rows, widths, values, every=interval)

    order = list(caveats.of_order(statistic, order_samples, *sides))
    estimates = {}
    for measure in measures:
        value, by_chance = values[measure.name], chance.get(measure.name)
        estimate = Estimate.of(
            measure,
            value,
            n=statistic.n,
            statistic=described,
            interval=intervals.get(measure.name, (None, None)),
            chance=by_chance,
            # Blocks of rows that come in an order are not a fair sample, so their error is unknown.
            block_error=None if order else from_all_rows(measure, statistic),
        )
        undefined = pairs[measure.name].undefined if measure.name in pairs else {}
        notes = [
            *caveats.of_constants(statistic, *sides, constant_a, constant_b),
            *caveats.of_undefined(undefined, *sides),
            *caveats.of_widths(measure, statistic, *sides),
            *caveats.of_lost_directions(measure, statistic, *sides),
            *caveats.of_one_direction(measure, statistic, *sides),
            *caveats.of_one_row(measure, statistic, rows, *sides),
            *caveats.of_hardly_varying(statistic, *sides),
            *caveats.of_neighbours(measure, statistic),
            *(order or caveats.of_statistic(statistic, estimate.block_error)),
            *caveats.of_bounds(measure, value),
            *caveats.of_chance(measure, estimate, by_chance, *sides, draws=draws, interval=interval),
            *([] if correlated is None else [correlated]),
        ]
        notes += caveats.of_nan(value, notes, *sides)
        estimates[measure.name] = replace(estimate, caveats=tuple(notes))
    return estimates


# Pair by pair, for measures whose views do not broadcast over all pairs of sites


@dataclass
class PairValues:
    """One measure's values over pairs of sites, and the reasons why some are missing."""

    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    undefined: dict[tuple[int, int], str] = field(default_factory=dict)

    def matrix(self, shape: tuple[int, int]) -> Tensor:
        """The values, NaN where there is none; placed all at once, so that no pair waits for the device."""
        if not self.values:
            return torch.full(shape, torch.nan, dtype=torch.float64)
        stacked = torch.stack([value.double() for value in self.values.values()])
        matrix = torch.full(shape, torch.nan, dtype=torch.float64, device=stacked.device)
        matrix.view(-1)[[i * shape[1] + j for i, j in self.values]] = stacked
        return matrix


def by_pair(
    measures: Sequence[Measure],
    statistic: Collected | PairViews,
    widths: Widths,
    defined_a: np.ndarray,
    defined_b: np.ndarray,
    *,
    once: bool = False,
) -> dict[str, PairValues]:
    """Evaluate measures pair by pair, all on one pair before the next, so that they share its factorisations.

    On a CPU several pairs run at a time; measures that can take all pairs at once do so. `widths` are those of the
    sites, which projected rows no longer have. `once`: only pairs i ≤ j.
    """
    results = {measure.name: PairValues() for measure in measures}
    if not measures:
        return results
    a, b = (np.flatnonzero(defined).tolist() for defined in (defined_a, defined_b))
    pairs = [(i, j) for i in a for j in b if i <= j or not once]
    if isinstance(statistic, Sample) and len(pairs) > 1:
        for measure in measures:
            if measure.all_pairs and (matrix := _of_all_pairs(measure, statistic, a, b)) is not None:
                results[measure.name].values = {(i, j): matrix[a.index(i), b.index(j)] for i, j in pairs}
        measures = [measure for measure in measures if not results[measure.name].values]
    if not measures:
        return results

    def of_pair(pair: tuple[int, int]) -> None:
        i, j = pair
        views: dict[object, Covariances | Neurons | PairedRows | Splits] = {}
        for measure in measures:
            try:
                measure.check_widths(widths[0][i], widths[1][j])
                key = measure.reads, *measure.folds.values()
                if key not in views:
                    views[key] = view_of(measure, statistic, i, j)
                results[measure.name].values[i, j] = measure(views[key])
            except UNDEFINED as error:
                results[measure.name].undefined[i, j] = str(error)

    one_by_one = _on_gpu(statistic) or len(pairs) == 1
    # Closed at once, also after an interrupt: a traceback that is kept would keep torch on one thread.
    with closing((done for done in map(of_pair, pairs)) if one_by_one else side_by_side(of_pair, pairs)) as in_turn:
        for _ in track(in_turn, ", ".join(results), len(pairs), "pairs of sites"):
            pass
    return results


def _on_gpu(statistic: Collected | PairViews) -> bool:
    if isinstance(statistic, Sample):
        return statistic.xs[0].is_cuda
    if isinstance(statistic, SplitMoments):
        statistic = statistic.total
    return isinstance(statistic, Moments) and statistic.cross.is_cuda


def _of_all_pairs(measure: Measure, sample: Sample, a: Sequence[int], b: Sequence[int]) -> Tensor | None:
    """The values (A, B) of these sites; None if it takes each pair to say where there are none, and why."""
    try:
        view = sample.of_all_pairs(measure.reads, a, b)
        return None if view is None else measure(view)
    except UNDEFINED:
        return None


def view_of(
    measure: Measure, statistic: Collected | PairViews, i: int, j: int
) -> Covariances | Neurons | PairedRows | Splits:
    assert not isinstance(statistic, Grams)
    if isinstance(statistic, SplitMoments):
        return statistic.splits(i, j)
    if measure.reads is Splits:
        assert isinstance(statistic, Sample)
        return statistic.splits(i, j, **measure.folds)
    if issubclass(measure.reads, Covariances):
        return statistic.covariances(i, j)
    if issubclass(measure.reads, Neurons):
        assert isinstance(statistic, (Moments, Sample))
        return statistic.neurons(i, j)
    assert not isinstance(statistic, Moments)
    return statistic.paired(i, j)


def constant_sites(spread: Tensor, side: Side, slack: float = 1) -> np.ndarray:
    """True for sites whose features vary by no more than rounding; an all-zero site has spread 0/0."""
    limits = [CONSTANT.get(dtype, CONSTANT_IN_FLOAT32) for dtype in side.dtypes] or [CONSTANT_IN_FLOAT32]
    return ~(spread.detach().cpu().numpy() > slack * np.array(limits))


# Chance and intervals from rows: the measures are evaluated again on shuffled rows, and on parts of them


def by_draws(
    measures: Sequence[Measure],
    statistic: Statistic,
    rows: Sample | None,
    widths: Widths,
    defined: tuple[Array, Array],
    *,
    draws: int,
    seed: int,
) -> dict[str, Chance]:
    """Chance for each measure that depends on the pairing, from shuffles within blocks, or of sampled `rows`."""
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
    if rows is None:
        return {}
    fewer = rows.n if rows.n < statistic.n else None
    shuffles = [Shuffle.draw(rows.n, seed, number, rows.xs[0].device) for number in range(draws)]
    values: dict[str, Array] = {}
    drawn: dict[str, Array] = {}
    for measure in measures:
        if issubclass(measure.reads, Alignment):
            values[measure.name] = as_array(measure(rows.alignment(measure.reads)))
            drawn[measure.name] = as_array(measure(rows.grams.shuffled(measure.reads, shuffles)))
    if others := [m for m in measures if m.name not in values]:
        shape, names = (len(rows.xs), len(rows.ys)), ", ".join(m.name for m in others)
        start = time.monotonic()
        unshuffled = {
            name: as_array(pairs.matrix(shape)) for name, pairs in by_pair(others, rows, widths, *defined).items()
        }
        # The first evaluation takes longer than each draw, so this is an upper bound.
        if (seconds := (time.monotonic() - start) * draws) > LONG:
            warnings.warn(
                f"{draws} draws of {names} may take up to {seconds / 60:.0f} minutes; use fewer draws or sites, or "
                "rows='mean'",
                stacklevel=2,
            )
        shuffled: dict[str, list[Array]] = {name: [] for name in unshuffled}
        with Progress(f"chance for {names}", draws, "draws") as bar:
            for shuffle in shuffles:
                for name, pairs in by_pair(others, rows.shuffled(shuffle), widths, *defined).items():
                    shuffled[name].append(as_array(pairs.matrix(shape)))
                bar.advance()
        values |= unshuffled
        drawn |= {name: np.stack(arrays) for name, arrays in shuffled.items()}
    return {m.name: replace(judged(m, values[m.name], drawn[m.name]), rows=fewer) for m in measures}


def by_rows(
    measures: Sequence[Measure],
    statistic: Statistic,
    sample: Sample,
    widths: Widths,
    values: dict[str, Array],
    *,
    every: bool,
) -> dict[str, Interval]:
    """Intervals from the rows themselves, for cosines of Gram matrices, or with `every` for all measures."""
    p, q = (sum(widths) for widths in sample.widths)
    cheap = sample.n * min(p * q, sample.n * (p + q)) <= CHEAP
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
    """Errors from halves and quarters of the rows; where these are too few rows, from the jackknife, which is wider."""

    def evaluated(kept: Array, some: Sequence[Measure]) -> dict[str, Array]:
        """The values (…, A, B) of each measure on the rows of the groups that are kept (…, groups)."""
        parts: dict[str, list[Array]] = {m.name: [] for m in some}
        flat, group = kept.reshape(-1, kept.shape[-1]), dealt_evenly(sample.n, kept.shape[-1]).numpy()
        with Progress(f"intervals for {', '.join(parts)}", len(flat), "parts of the rows") as bar:
            for groups in flat:
                part = sample.without(torch.from_numpy(np.flatnonzero(~groups[group])))
                for name, pairs in by_pair(some, part, widths, defined[0], defined[1]).items():
                    parts[name].append(as_array(pairs.matrix((len(part.xs), len(part.ys)))))
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
    errors_of = {name: error.where(holds, jackknifed.get(name, error)) for name, (error, holds) in errors.items()}
    return jackknifed | errors_of
