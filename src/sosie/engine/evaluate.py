"""From statistics to values: every measure over every pair of sites, with its interval and its caveats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..measures import Measure, settled
from ..results import Caveat, Side, Values
from ..stats import Alignment, Grams, Statistic
from . import caveats
from .pairwise import by_pair

FEWEST_GROUPS = 8  # groups of blocks below which a jackknife interval says too little
CONFIDENCE = 0.95
CONSTANT = {"float64": 1e-24}  # share of Σ‖x‖² that rounding alone can give a constant feature
CONSTANT_IN_FLOAT32 = 1e-12


def evaluate(measures: Sequence[Measure], statistic: Statistic, side_a: Side, side_b: Side) -> dict[str, Values]:
    """The values of measures that read one statistic, (sites of A, sites of B) each."""
    constant_a, constant_b = (_constant(s, side) for s, side in zip(statistic.spread, (side_a, side_b), strict=True))
    one_by_one = [m for m in measures if not issubclass(m.reads, Alignment)]
    found = by_pair(one_by_one, statistic, ~constant_a, ~constant_b)
    values = {}
    for measure in measures:
        if measure.name in found:
            value, undefined = (
                found[measure.name].matrix((len(constant_a), len(constant_b))),
                found[measure.name].undefined,
            )
        else:
            value, undefined = measure(statistic.alignment(measure.reads)), {}
        exact = {*side_a.dtypes, *side_b.dtypes} == {"float64"}
        value = settled(value, measure, torch.float64 if exact else torch.float32)
        array = value.detach().cpu().double().numpy().copy()
        array[constant_a, :] = np.nan
        array[:, constant_b] = np.nan
        doubts = [
            *caveats.of_constants(statistic, side_a, side_b, constant_a, constant_b),
            *caveats.of_undefined(undefined, side_a, side_b),
            *caveats.of_widths(measure, statistic, side_a, side_b),
            *caveats.of_order(statistic, side_a, side_b),
            *caveats.of_statistic(measure, statistic),
            *caveats.of_bounds(measure, array),
        ]
        doubts += caveats.of_nan(array, doubts, side_a, side_b)
        values[measure.name] = _values(measure, statistic, array, doubts)
    return values


def _values(measure: Measure, statistic: Statistic, array: np.ndarray, doubts: Sequence[Caveat]) -> Values:
    low, high = _interval(measure, statistic, array)
    return Values(
        value=array,
        low=low,
        high=high,
        n=statistic.n,
        statistic=statistic.describe(),
        closer=measure.closer,
        bounds=(_number(measure.bounds[0]), _number(measure.bounds[1])),
        same=_number(measure.same),
        caveats=tuple(doubts),
    )


def _number(bound: float | None) -> float | None:
    return None if bound is None else float(bound)


def _constant(spread: Tensor, side: Side) -> np.ndarray:
    """Sites whose features do not vary beyond rounding; an all-zero site has spread 0/0."""
    limits = [CONSTANT.get(dtype, CONSTANT_IN_FLOAT32) for dtype in side.dtypes] or [CONSTANT_IN_FLOAT32]
    return ~(spread.detach().cpu().numpy() > np.array(limits))


def _interval(measure: Measure, statistic: Statistic, value: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Delete-one-group jackknife over blocks of rows, with Student's t."""
    if not isinstance(statistic, Grams) or not issubclass(measure.reads, Alignment):
        return None, None
    groups = statistic.groups
    if int(groups.sum()) < FEWEST_GROUPS:
        return None, None
    return jackknife(measure, measure(statistic.alignment(measure.reads, jackknife=True))[groups], value)


def jackknife(measure: Measure, without: Tensor, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The interval from the values (groups, …) that are left when each group of rows is left out."""
    from scipy.special import stdtrit

    left, count = without.detach().cpu().numpy(), len(without)
    error = np.sqrt((count - 1) / count * np.square(left - left.mean(0)).sum(0))
    reach = stdtrit(count - 1, (1 + CONFIDENCE) / 2) * error
    low, high = value - reach, value + reach
    bottom, top = measure.bounds
    # An interval may end at a bound of the measure, since no value lies beyond; the value itself is not touched.
    return (
        low if bottom is None else np.maximum(low, bottom),
        high if top is None else np.minimum(high, top),
    )
