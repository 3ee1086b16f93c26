"""From sums over outputs to values, with interval, chance and caveats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..measures import Measure, chance_of, settled
from ..results import Caveat, Values
from ..stats import MarkedPredictions, OutputSums, Predictions
from . import caveats
from .interval import FEWEST_GROUPS, around
from .standard_error import by_jackknife


def evaluate_outputs(measures: Sequence[Measure], sums: OutputSums, doubts: Sequence[str]) -> dict[str, Values]:
    """The values of measures of outputs, one pair of sites each."""
    return {measure.name: _values(measure, sums, doubts) for measure in measures}


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
    bottom, top = (None if bound is None else float(bound) for bound in measure.bounds)
    return Values(
        value=value,
        n=sums.n,
        statistic=sums.describe(),
        closer=measure.closer,
        bounds=(bottom, top),
        same=None if measure.same is None else float(measure.same),
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
