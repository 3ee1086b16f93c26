"""From statistics to values: every measure over every pair of sites, with interval, chance and caveats beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..measures import Measure, snap_to_bounds
from ..results import Estimate, Side
from ..stats import Alignment, Grams, Moments, Sample, Statistic
from . import caveats, uncertainty
from .pairs import by_pair, constant_sites

Interval = tuple[np.ndarray | None, np.ndarray | None]


def evaluate(
    measures: Sequence[Measure],
    statistic: Statistic,
    side_a: Side,
    side_b: Side,
    *,
    sample: Sample | None = None,
    draws: int = 0,
    seed: int = 0,
    interval: bool = False,
    independent: bool = True,
) -> dict[str, Estimate]:
    """The values of measures that read one statistic, (sites of A, sites of B) each.

    `sample` holds rows where the statistic itself does not: intervals and chance can be had from them. p-values come
    from `draws` shuffles; `interval` asks for intervals even where they take long. Rows that are not `independent`,
    the positions of one input, have neither interval nor chance.
    """
    if not measures:
        return {}
    if isinstance(statistic, Moments):
        statistic = statistic.beside(sample)
    rows = statistic if isinstance(statistic, Sample) else sample
    sides, widths = (side_a, side_b), (side_a.widths, side_b.widths)
    constant_a, constant_b = (constant_sites(s, side) for s, side in zip(statistic.spread, sides, strict=True))
    pairs = by_pair(
        [m for m in measures if not issubclass(m.reads, Alignment)], statistic, widths, ~constant_a, ~constant_b
    )
    digits = torch.float64 if {*side_a.dtypes, *side_b.dtypes} == {"float64"} else torch.float32
    values = {}
    for measure in measures:
        if measure.name in pairs:
            matrix = pairs[measure.name].matrix((len(constant_a), len(constant_b)))
        else:
            matrix = measure(statistic.alignment(measure.reads))
        values[measure.name] = array = uncertainty.as_array(snap_to_bounds(matrix, measure, digits)).copy()
        array[constant_a, :] = array[:, constant_b] = np.nan

    chance: dict[str, uncertainty.Chance] = {}
    reach: dict[str, Interval] = {}
    if independent:
        if draws:
            defined = (~constant_a, ~constant_b)
            chance = uncertainty.by_draws(measures, statistic, rows, widths, defined, draws=draws, seed=seed)
        for measure in measures:  # mean and spread by a formula, where there is one
            if (formula := uncertainty.by_formula(measure, statistic)) is not None:
                drawn = chance.get(measure.name, formula)
                chance[measure.name] = replace(drawn, null=formula.null, spread=formula.spread)
        if isinstance(statistic, Grams):
            reach = {m.name: uncertainty.by_blocks(m, statistic, values[m.name]) for m in measures}
        elif rows is not None and rows.n >= 4:
            reach = uncertainty.by_rows(measures, statistic, rows, widths, values, every=interval)

    order = list(caveats.of_order(statistic, *sides))
    estimates = {}
    for measure in measures:
        value, by_chance = values[measure.name], chance.get(measure.name)
        low, high = reach.get(measure.name, (None, None))
        estimate = Estimate.of(
            measure,
            value,
            n=statistic.n,
            statistic=statistic.describe(),
            low=low,
            high=high,
            # Blocks of rows that come in an order are no fair sample, and cannot tell how far off they are.
            block_error=None if order else uncertainty.from_all_rows(measure, statistic),
            **({} if by_chance is None else by_chance.fields()),
        )
        undefined = pairs[measure.name].undefined if measure.name in pairs else {}
        said = [
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
            *([] if independent else [caveats.OF_POSITIONS]),
        ]
        said += caveats.of_nan(value, said, *sides)
        estimates[measure.name] = replace(estimate, caveats=tuple(said))
    return estimates
