"""From statistics to values: every measure over every pair of sites, with its doubt beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..measures import Measure, settled
from ..results import Caveat, Side, Values
from ..stats import Alignment, Grams, Moments, Sample, Statistic
from . import caveats, chance, data_caveats, interval
from .doubt import NO_DOUBT, Doubt
from .pairwise import Widths, by_pair

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
    doubt: Doubt = NO_DOUBT,
    independent: bool = True,
) -> dict[str, Values]:
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
        value = settled(value, measure, torch.float64 if exact else torch.float32)
        arrays[measure.name] = array = value.detach().cpu().double().numpy().copy()
        array[constant_a, :] = array[:, constant_b] = np.nan
        undefined[measure.name] = {} if pairs is None else pairs.undefined
    rows = statistic if isinstance(statistic, Sample) else sample
    if not independent:
        by_chance: dict[str, chance.Chance] = {}
        reach: dict[str, tuple[Array | None, Array | None]] = {}
    else:
        by_chance = _chance(measures, statistic, rows, widths, (~constant_a, ~constant_b), doubt)
        reach = _intervals(measures, statistic, rows, widths, arrays, doubt)
    order = list(caveats.of_order(statistic, side_a, side_b))
    values = {}
    for measure in measures:
        array = arrays[measure.name]
        # Blocks of rows that come in an order are no fair sample, and cannot tell how far off they are.
        off = None if order else interval.from_all_rows(measure, statistic)
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
    yield from data_caveats.of_one_direction(measure, statistic, side_a, side_b)
    yield from data_caveats.of_one_row(measure, statistic, rows, side_a, side_b)
    yield from data_caveats.of_hardly_varying(statistic, side_a, side_b)
    yield from data_caveats.of_neighbours(measure, statistic)


def _chance(
    measures: Sequence[Measure],
    statistic: Statistic,
    rows: Sample | None,
    widths: Widths,
    defined: tuple[Array, Array],
    doubt: Doubt,
) -> dict[str, chance.Chance]:
    """Formulas for mean and spread where there are any; p-values by draws if asked for."""
    found = {}
    if doubt.draws:
        found = chance.by_draws(measures, statistic, rows, widths, defined, draws=doubt.draws, seed=doubt.seed)
    for measure in measures:
        formula = chance.by_formula(measure, statistic)
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
    doubt: Doubt,
) -> dict[str, tuple[Array | None, Array | None]]:
    if isinstance(statistic, Grams):
        return {m.name: interval.by_blocks(m, statistic, values[m.name]) for m in measures}
    if rows is None or rows.n < 4:
        return {}
    return interval.by_rows(measures, statistic, rows, widths, values, every=doubt.interval)


def _values(
    measure: Measure,
    statistic: Statistic,
    array: Array,
    by_chance: chance.Chance | None,
    reach: tuple[Array | None, Array | None],
    block_error: Array | None,
) -> Values:
    def where_defined(found: Array | None) -> Array | None:
        return None if found is None else np.where(np.isnan(array), np.nan, found)

    by_name = {} if by_chance is None else by_chance.fields()
    at_random: dict[str, Any] = {name: where_defined(part) for name, part in by_name.items()}
    return Values(
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
