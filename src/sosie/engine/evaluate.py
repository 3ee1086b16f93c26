"""From statistics to values: every measure over every pair of sites, with its interval and its caveats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..measures import Measure, settled
from ..progress import track
from ..results import Side, Values
from ..stats import Alignment, Covariances, Grams, Sample, Statistic
from . import caveats

FEWEST_GROUPS = 8  # groups of blocks below which a jackknife interval says too little
CONFIDENCE = 0.95
CONSTANT = 1e-12  # share of Σ‖x‖² that float32 rounding alone can give a constant feature


def evaluate(measure: Measure, statistic: Statistic, side_a: Side, side_b: Side) -> Values:
    """The values of one measure, (sites of A, sites of B)."""
    constant_a, constant_b = (_constant(spread) for spread in statistic.spread)
    undefined: dict[tuple[int, int], str] = {}
    if issubclass(measure.reads, Alignment):
        value = settled(measure(statistic.alignment(measure.reads)), measure, torch.float32)
    else:
        value = settled(_pairwise(measure, statistic, (constant_a, constant_b), undefined), measure, torch.float32)
    found = value.detach().cpu().double().numpy().copy()
    found[constant_a, :] = np.nan
    found[:, constant_b] = np.nan
    low, high = _interval(measure, statistic, found)
    doubts = [
        *caveats.of_constants(statistic, side_a, side_b, constant_a, constant_b),
        *caveats.of_undefined(undefined, side_a, side_b),
        *caveats.of_widths(measure, statistic, side_a, side_b),
        *caveats.of_statistic(measure, statistic),
        *caveats.of_bounds(measure, found),
    ]
    doubts += caveats.of_nan(found, doubts, side_a, side_b)
    return Values(
        value=found,
        low=low,
        high=high,
        n=statistic.n,
        statistic=statistic.describe(),
        closer=measure.closer,
        bounds=(_number(measure.bounds[0]), _number(measure.bounds[1])),
        same=float(measure.same),
        caveats=tuple(doubts),
    )


def _number(bound: float | None) -> float | None:
    return None if bound is None else float(bound)


def _constant(spread: Tensor) -> np.ndarray:
    """Sites whose features do not vary beyond rounding; an all-zero site has spread 0/0."""
    return ~(spread.detach().cpu().numpy() > CONSTANT)


def _pairwise(
    measure: Measure, statistic: Statistic, constant: Sequence[np.ndarray], undefined: dict[tuple[int, int], str]
) -> Tensor:
    """Pair by pair, where views do not broadcast; what one site needs is still made once."""
    count_a, count_b = map(len, constant)
    found: dict[tuple[int, int], Tensor] = {}
    pairs = [(i, j) for i in range(count_a) for j in range(count_b) if not (constant[0][i] or constant[1][j])]
    for i, j in track(pairs, measure.name, len(pairs), "pairs of sites"):
        try:
            found[i, j] = _one(measure, statistic, i, j)
        except (ValueError, torch.linalg.LinAlgError) as error:
            undefined[i, j] = str(error)
    device = next((value.device for value in found.values()), torch.device("cpu"))
    values = torch.full((count_a, count_b), torch.nan, dtype=torch.float64, device=device)
    if found:  # placed all at once: no wait for a device at each pair
        values.view(-1)[[i * count_b + j for i, j in found]] = torch.stack(list(found.values()))
    return values


def _one(measure: Measure, statistic: Statistic, i: int, j: int) -> Tensor:
    if issubclass(measure.reads, Covariances):
        assert not isinstance(statistic, Grams)
        return measure(statistic.covariances(i, j)).double()
    assert isinstance(statistic, Sample)
    return measure(statistic.paired(i, j)).double()


def _interval(measure: Measure, statistic: Statistic, value: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Delete-one-group jackknife over blocks of rows, with Student's t."""
    if not isinstance(statistic, Grams) or not issubclass(measure.reads, Alignment):
        return None, None
    groups = statistic.groups
    count = int(groups.sum())
    if count < FEWEST_GROUPS:
        return None, None
    from scipy.special import stdtrit

    left = measure(statistic.alignment(measure.reads, jackknife=True))[groups].cpu().numpy()
    error = np.sqrt((count - 1) / count * np.square(left - left.mean(0)).sum(0))
    reach = stdtrit(count - 1, (1 + CONFIDENCE) / 2) * error
    low, high = value - reach, value + reach
    bottom, top = measure.bounds
    # An interval may end at a bound of the measure, since no value lies beyond; the value itself is not touched.
    return (
        low if bottom is None else np.maximum(low, bottom),
        high if top is None else np.minimum(high, top),
    )
