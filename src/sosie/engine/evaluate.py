"""From statistics to values: every measure over every pair of sites, with its doubt beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..linalg import side_by_side
from ..measures import Measure, snap_to_bounds
from ..progress import track
from ..results import Caveat, Estimate, Side
from ..stats import Alignment, Covariances, Grams, Moments, Neurons, PairedRows, PairViews, Sample, Statistic
from . import caveats, uncertainty
from .plan import NO_DOUBT, UncertaintyOptions

# Values pair by pair, for measures whose views do not broadcast over all pairs of sites

Widths = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class PairValues:
    """One measure's values over pairs of sites, and why some are missing."""

    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    undefined: dict[tuple[int, int], str] = field(default_factory=dict)

    def matrix(self, shape: tuple[int, int]) -> Tensor:
        """NaN where there is no value; placed all at once, so that no pair waits for the device."""
        if not self.values:
            return torch.full(shape, torch.nan, dtype=torch.float64)
        stacked = torch.stack([value.double() for value in self.values.values()])
        matrix = torch.full(shape, torch.nan, dtype=torch.float64, device=stacked.device)
        matrix.view(-1)[[i * shape[1] + j for i, j in self.values]] = stacked
        return matrix


def by_pair(
    measures: Sequence[Measure],
    statistic: Statistic | PairViews,
    widths: Widths,
    defined_a: np.ndarray,
    defined_b: np.ndarray,
    *,
    once: bool = False,
) -> dict[str, PairValues]:
    """All measures on one pair before the next, so that they share its factorisations; a site's own are made once.

    On a CPU several pairs at a time.

    `widths` are those of the sites: rows that were projected no longer tell. `once`: only pairs i ≤ j.
    """
    found = {measure.name: PairValues() for measure in measures}
    if not measures:
        return found
    pairs = [(i, j) for i in np.flatnonzero(defined_a).tolist() for j in np.flatnonzero(defined_b).tolist()]
    pairs = [(i, j) for i, j in pairs if i <= j or not once]

    def of_pair(pair: tuple[int, int]) -> None:
        i, j = pair
        views: dict[type, Covariances | Neurons | PairedRows] = {}
        for measure in measures:
            try:
                check_widths(measure, widths[0][i], widths[1][j])
                if measure.reads not in views:
                    views[measure.reads] = view_of(measure.reads, statistic, i, j)
                found[measure.name].values[i, j] = measure(views[measure.reads])
            except (ValueError, ImportError, torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:
                found[measure.name].undefined[i, j] = str(error)

    alone = _on_gpu(statistic) or len(pairs) == 1
    # Closed at once after an interrupt, too: a traceback that is kept would keep torch on one thread.
    with closing((done for done in map(of_pair, pairs)) if alone else side_by_side(of_pair, pairs)) as in_turn:
        for _ in track(in_turn, ", ".join(found), len(pairs), "pairs of sites"):
            pass
    return found


def _on_gpu(statistic: Statistic | PairViews) -> bool:
    if isinstance(statistic, Sample):
        return statistic.xs[0].is_cuda
    return isinstance(statistic, Moments) and statistic.cross.is_cuda


def check_widths(measure: Measure, x: int, y: int) -> None:
    if measure.same_width and x != y:
        raise ValueError(f"{measure.name} compares neuron by neuron, so needs equal widths, got {x} and {y}")


def view_of(kind: type, statistic: Statistic | PairViews, i: int, j: int) -> Covariances | Neurons | PairedRows:
    assert not isinstance(statistic, Grams)
    if issubclass(kind, Covariances):
        return statistic.covariances(i, j)
    if issubclass(kind, Neurons):
        assert isinstance(statistic, (Moments, Sample))
        return statistic.neurons(i, j)
    assert not isinstance(statistic, Moments)
    return statistic.paired(i, j)


CONSTANT = {"float64": 1e-24}  # share of Σ‖x‖² that rounding alone can give a constant feature
CONSTANT_IN_FLOAT32 = 1e-12

Array = np.ndarray


def evaluate(
    measures: Sequence[Measure],
    statistic: Statistic,
    side_a: Side,
    side_b: Side,
    *,
    sample: Sample | None = None,
    doubt: UncertaintyOptions = NO_DOUBT,
    independent: bool = True,
) -> dict[str, Estimate]:
    """The values of measures that read one statistic, (sites of A, sites of B) each.

    `sample` holds rows where the statistic itself does not: intervals and chance can be had from them. Rows that
    are not `independent`, the positions of one input, have neither.
    """
    if not measures:
        return {}
    if isinstance(statistic, Moments):
        statistic = statistic.beside(sample)
    constant_a, constant_b = (
        constant_sites(s, side) for s, side in zip(statistic.spread, (side_a, side_b), strict=True)
    )
    widths = side_a.widths, side_b.widths
    one_by_one = [m for m in measures if not issubclass(m.reads, Alignment)]
    found = by_pair(one_by_one, statistic, widths, ~constant_a, ~constant_b)
    exact = {*side_a.dtypes, *side_b.dtypes} == {"float64"}
    arrays, undefined = {}, {}
    for measure in measures:
        pairs = found.get(measure.name)
        value = (
            measure(statistic.alignment(measure.reads))
            if pairs is None
            else pairs.matrix((len(constant_a), len(constant_b)))
        )
        value = snap_to_bounds(value, measure, torch.float64 if exact else torch.float32)
        arrays[measure.name] = array = value.detach().cpu().double().numpy().copy()
        array[constant_a, :] = array[:, constant_b] = np.nan
        undefined[measure.name] = {} if pairs is None else pairs.undefined
    rows = statistic if isinstance(statistic, Sample) else sample
    if not independent:
        by_chance: dict[str, uncertainty.Chance] = {}
        reach: dict[str, tuple[Array | None, Array | None]] = {}
    else:
        by_chance = _chance(measures, statistic, rows, widths, (~constant_a, ~constant_b), doubt)
        reach = _intervals(measures, statistic, rows, widths, arrays, doubt)
    order = list(caveats.of_order(statistic, side_a, side_b))
    values = {}
    for measure in measures:
        array = arrays[measure.name]
        # Blocks of rows that come in an order are no fair sample, and cannot tell how far off they are.
        off = None if order else uncertainty.from_all_rows(measure, statistic)
        near = reach.get(measure.name, (None, None))
        made = _values(measure, statistic, array, by_chance.get(measure.name), near, off)
        doubts = [
            *caveats.of_constants(statistic, side_a, side_b, constant_a, constant_b),
            *caveats.of_undefined(undefined[measure.name], side_a, side_b),
            *_words(measure, statistic, rows, side_a, side_b),
            *(order or caveats.of_statistic(statistic, made.block_error)),
            *caveats.of_bounds(measure, array),
            *caveats.of_chance(measure, made, by_chance.get(measure.name), doubt, side_a, side_b),
            *([] if independent else [caveats.OF_POSITIONS]),
        ]
        doubts += caveats.of_nan(array, doubts, side_a, side_b)
        values[measure.name] = replace(made, caveats=tuple(doubts))
    return values


def _words(measure: Measure, statistic: Statistic, rows: Sample | None, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    """Doubts that have a rule."""
    yield from caveats.of_widths(measure, statistic, side_a, side_b)
    yield from caveats.of_lost_directions(measure, statistic, side_a, side_b)
    yield from caveats.of_one_direction(measure, statistic, side_a, side_b)
    yield from caveats.of_one_row(measure, statistic, rows, side_a, side_b)
    yield from caveats.of_hardly_varying(statistic, side_a, side_b)
    yield from caveats.of_neighbours(measure, statistic)


def _chance(
    measures: Sequence[Measure],
    statistic: Statistic,
    rows: Sample | None,
    widths: Widths,
    defined: tuple[Array, Array],
    doubt: UncertaintyOptions,
) -> dict[str, uncertainty.Chance]:
    """Formulas for mean and spread where there are any; p-values by draws if asked for."""
    found = {}
    if doubt.draws:
        found = uncertainty.by_draws(measures, statistic, rows, widths, defined, draws=doubt.draws, seed=doubt.seed)
    for measure in measures:
        formula = uncertainty.by_formula(measure, statistic)
        if formula is not None:
            drawn = found.get(measure.name, formula)
            found[measure.name] = replace(drawn, null=formula.null, spread=formula.spread)
    return found


def _intervals(
    measures: Sequence[Measure],
    statistic: Statistic,
    rows: Sample | None,
    widths: Widths,
    values: dict[str, Array],
    doubt: UncertaintyOptions,
) -> dict[str, tuple[Array | None, Array | None]]:
    if isinstance(statistic, Grams):
        return {m.name: uncertainty.by_blocks(m, statistic, values[m.name]) for m in measures}
    if rows is None or rows.n < 4:
        return {}
    return uncertainty.by_rows(measures, statistic, rows, widths, values, every=doubt.interval)


def _values(
    measure: Measure,
    statistic: Statistic,
    array: Array,
    by_chance: uncertainty.Chance | None,
    reach: tuple[Array | None, Array | None],
    block_error: Array | None,
) -> Estimate:
    def where_defined(found: Array | None) -> Array | None:
        return None if found is None else np.where(np.isnan(array), np.nan, found)

    by_name = {} if by_chance is None else by_chance.fields()
    at_random: dict[str, Any] = {name: where_defined(part) for name, part in by_name.items()}
    return Estimate(
        value=array,
        low=where_defined(reach[0]),
        high=where_defined(reach[1]),
        n=statistic.n,
        statistic=statistic.describe(),
        closer=measure.closer,
        bounds=measure.bounds,
        same=measure.same,
        block_error=where_defined(block_error),
        **at_random,
    )


def constant_sites(spread: Tensor, side: Side, slack: float = 1) -> Array:
    """Sites whose features do not vary beyond rounding; an all-zero site has spread 0/0."""
    limits = [CONSTANT.get(dtype, CONSTANT_IN_FLOAT32) for dtype in side.dtypes] or [CONSTANT_IN_FLOAT32]
    return ~(spread.detach().cpu().numpy() > slack * np.array(limits))
