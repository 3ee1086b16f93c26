"""From sums over outputs to values, with interval, chance and caveats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..measures import Measure, chance_of, settled
from ..results import ARRAYS, Caveat, Side, Values
from ..stats import MarkedPredictions, OutputSums, Predictions
from . import caveats
from .interval import FEWEST_GROUPS, around
from .standard_error import by_jackknife

Grid = dict[tuple[str, str], OutputSums]  # by the sites of A and of B


def evaluate_outputs(
    measures: Sequence[Measure], grid: Grid, sides: tuple[Side, Side], doubts: Sequence[str]
) -> dict[str, Values]:
    """The values of measures of outputs, for every pair of sites."""
    return {measure.name: _of_grid(measure, grid, sides, doubts) for measure in measures}


def _of_grid(measure: Measure, grid: Grid, sides: tuple[Side, Side], doubts: Sequence[str]) -> Values:
    cells = {sites: _values(measure, sums, doubts) for sites, sums in grid.items()}
    first = next(iter(cells.values()))
    if len(cells) == 1:
        return first
    own = {  # what is said of every cell is said once
        Caveat(caveat.text) if caveat.text in doubts else Caveat(caveat.text, *sites): None
        for sites, values in cells.items()
        for caveat in values.caveats
    }
    arrays: dict[str, Any] = {kind: _joined(cells, sides, kind) for kind in ARRAYS}
    return replace(first, caveats=tuple(own), **arrays)


def _joined(cells: dict[tuple[str, str], Values], sides: tuple[Side, Side], kind: str) -> np.ndarray | None:
    """One matrix of all cells; NaN where a cell has no such number, None where none has."""
    found = {sites: getattr(values, kind) for sites, values in cells.items()}
    if all(number is None for number in found.values()):
        return None
    rows = [[found[a, b] for b in sides[1].sites] for a in sides[0].sites]
    return np.array([[np.nan if number is None else number.item() for number in row] for row in rows])


def accuracies(sums: OutputSums) -> tuple[float, float] | None:
    """Of both models, where there were labels."""
    if MarkedPredictions not in sums.supplies:
        return None
    a, b = (float(sums.sums[name].sum()) / sums.n for name in ("right_a", "right_b"))
    return a, b


def _values(measure: Measure, sums: OutputSums, doubts: Sequence[str]) -> Values:
    found = [Caveat(text) for text in doubts]
    try:
        with torch.no_grad():
            value = np.array([[float(settled(measure.from_outputs(sums), measure))]])
    except ValueError as error:
        value = np.array([[np.nan]])
        found.append(Caveat(f"undefined: {error}"))
    found += [*_ties(measure, sums), *caveats.of_bounds(measure, value)]
    low, high = _interval(measure, sums, value)
    chance = None if np.isnan(value).any() else chance_of(measure.base, sums)
    return Values(
        value=value,
        n=sums.n,
        statistic=sums.describe(),
        closer=measure.closer,
        bounds=measure.bounds,
        same=measure.same,
        low=low,
        high=high,
        null=None if chance is None else np.array([[chance.mean]]),
        null_spread=None if chance is None or chance.spread is None else np.array([[chance.spread]]),
        p=None if chance is None or chance.p is None else np.array([[chance.p]]),
        caveats=tuple(found),
    )


def _interval(measure: Measure, sums: OutputSums, value: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Delete-one-group jackknife; none where there are few groups, or one carries all that defines the value."""
    if np.isnan(value).any() or int(sums.groups.sum()) < FEWEST_GROUPS:
        return None, None
    try:
        with torch.no_grad():
            without = measure.from_outputs(sums, jackknife=True)[sums.groups]
    except ValueError:
        return None, None
    return around(measure, value, by_jackknife(without[:, None, None].detach().cpu().numpy()))


def _ties(measure: Measure, sums: OutputSums) -> Iterator[Caveat]:
    if issubclass(measure.reads, Predictions):
        for side, count in zip("AB", sums.ties, strict=True):
            if count:
                yield Caveat(f"{count} of {sums.n} outputs of {side} have several largest entries: the first counts")
