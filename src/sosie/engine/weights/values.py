"""Values of one pair of models, with their interval, what chance gives, and caveats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...linalg import Invariants, permuted_moments
from ...measures import Measure, settled
from ...results import Caveat, Values
from .. import caveats
from ..chance import Chance, judged
from ..interval import FEWEST_GROUPS, around
from ..standard_error import by_jackknife
from .probing import PROBES
from .sources import WeightSource

FEWEST_ENTRIES = 4  # of an input, for the formula of the chance level
OF_ARCHITECTURE = (
    "what networks give that have nothing to do with each other depends on how they are built: convolutions alone make "
    "them alike. null='weights' measures it"
)


@dataclass(frozen=True)
class Found:
    """Values (S, T) of one pair of models; each block of probes left out (blocks, S, T); what chance depends on."""

    value: Tensor
    without: Tensor | None
    invariants: tuple[Invariants, Invariants] | None


@dataclass(frozen=True)
class Told:
    """What a result says beside the values."""

    a: WeightSource
    b: WeightSource
    statistic: str
    n: int
    draws: int
    matched: bool


def values_of(measure: Measure, found: Found, drawn: Sequence[Found], told: Told) -> Values:
    value = array_of(settled(found.value, measure))
    low, high = _interval(measure, found, value)
    chance = _chance(measure, found, drawn, value, told)
    return Values(
        value=value,
        n=told.n,
        statistic=told.statistic,
        closer=measure.closer,
        bounds=measure.bounds,
        same=measure.same,
        low=low,
        high=high,
        caveats=tuple(_doubts(measure, value, chance, told, bounded=low is not None)),
        **({} if chance is None else chance.fields()),
    )


def _interval(measure: Measure, found: Found, value: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    if found.without is None or len(found.without) < FEWEST_GROUPS:
        return None, None
    return around(measure, value, by_jackknife(array_of(found.without)))


def _chance(measure: Measure, found: Found, drawn: Sequence[Found], value: np.ndarray, told: Told) -> Chance | None:
    """By shuffled weights where they were drawn; else by shuffled entries of an input that has no layout."""
    if drawn:
        return judged(measure, value, np.stack([array_of(settled(each.value, measure)) for each in drawn]))
    if found.invariants is None or _has_layout(told) or told.n < FEWEST_ENTRIES or "shift" not in measure.invariant:
        return None
    a, b = found.invariants
    x = Invariants(a.trace[:, None], a.norm[:, None], a.diagonal[:, None])
    y = Invariants(b.trace[None], b.norm[None], b.diagonal[None])
    mean, variance = permuted_moments(x, y, told.n)
    # Below 0 by rounding only, where a kernel is a multiple of the centring matrix: all shuffles give the same.
    spread = torch.where(variance > 0, variance, torch.zeros_like(variance)).sqrt()
    return Chance(array_of(mean), array_of(torch.where(variance.isnan(), variance, spread)))


def _has_layout(told: Told) -> bool:
    return len(told.a.shape) > 1 or len(told.b.shape) > 1


def _doubts(
    measure: Measure, value: np.ndarray, chance: Chance | None, told: Told, *, bounded: bool
) -> Iterator[Caveat]:
    yield from _undefined(value, told)
    if told.matched:
        yield Caveat(f"{measure.name} is the same for neurons in any order: they were not matched")
    for source in (told.a, told.b):
        if source.guessed:
            shape = " × ".join(map(str, source.shape))
            yield Caveat(f"{source.name}: an input was taken to be {shape}; input_shape= says otherwise")
        yield from (Caveat(f"{source.name}: {text}") for text in source.notes)
    if "Gaussian" in told.statistic:
        more = "more probes= narrow the interval" if bounded else f"probes={PROBES} or more give an interval"
        yield Caveat(f"estimated from {told.statistic}; {more}, more memory= makes it exact")
    yield from caveats.of_draws(told.draws)
    if chance is None and _has_layout(told):
        yield Caveat(OF_ARCHITECTURE)
    yield from caveats.of_bounds(measure, value)


def _undefined(value: np.ndarray, told: Told) -> Iterator[Caveat]:
    text = "undefined: the product of the weights up to here is zero, or the same for each entry of the input"
    lost = np.isnan(value)
    for i in np.flatnonzero(lost.all(1)):
        yield Caveat(text, site_a=told.a.known.sites[i])
    for j in np.flatnonzero(lost.all(0)):
        yield Caveat(text, site_b=told.b.known.sites[j])


def array_of(value: Tensor) -> np.ndarray:
    return value.detach().cpu().double().numpy()
