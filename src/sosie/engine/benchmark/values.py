"""A measure's values over many pairs of networks; what belongs to one network is worked out once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...linalg import side_by_side
from ...measures import Measure, settled
from ...results import Comparisons
from ...stats import Alignment, LinearMaps, Sample
from ..evaluate import CONSTANT_IN_FLOAT32
from ..pairwise import check_widths, view_of
from .candidates import Candidate

Pairs = Sequence[tuple[int, int]]


@dataclass
class Found:
    """Values in the order of the pairs, NaN where undefined, and how often for which reason."""

    values: np.ndarray
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def defined(self) -> np.ndarray:
        return np.isfinite(self.values)


class Clock:
    """A budget of seconds, shared by several calls."""

    def __init__(self, budget: float) -> None:
        self.budget, self._end = budget, time.monotonic() + budget

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end

    @property
    def reason(self) -> str:
        return f"not reached within the budget of {self.budget:g} s"


def values_of(
    candidate: Candidate,
    things: Sequence[Tensor] | Sequence[nn.Module],
    pairs: Pairs,
    *,
    inputs: Tensor | None = None,
    clock: Clock | None = None,
) -> Found:
    """The measure on pairs of (n, p) activations, or of networks; a pair that has no value says why.

    `inputs` are what the networks were given, flattened, for measures that need it.
    """
    if not isinstance(candidate.run, Measure):
        return _one_by_one(lambda i, j: candidate.value(things[i], things[j]), pairs, clock)
    if candidate.of == "models":
        return _of_weights(candidate.run, things, pairs)  # type: ignore[arg-type]
    return _of_rows(candidate.run, things, pairs, inputs, clock)  # type: ignore[arg-type]


def _of_rows(
    measure: Measure, rows: Sequence[Tensor], pairs: Pairs, inputs: Tensor | None, clock: Clock | None
) -> Found:
    sample = Sample.of(rows, rows, inputs=inputs if "inputs" in measure.needs else None)
    varies = (sample.spread[0] > CONSTANT_IN_FLOAT32).tolist()
    with torch.no_grad():
        if issubclass(measure.reads, Alignment):
            matrix = settled(measure(sample.alignment(measure.reads)), measure).cpu()
            return _one_by_one(lambda i, j: _finite(matrix[i, j], varies, i, j), pairs, None)

        def value(i: int, j: int) -> float:
            check_widths(measure, rows[i].shape[1], rows[j].shape[1])
            if not (varies[i] and varies[j]):
                return _finite(torch.tensor(torch.nan), varies, i, j)
            return _finite(settled(measure(view_of(measure.reads, sample, i, j)), measure), varies, i, j)

        return _one_by_one(value, pairs, clock, threads=not rows[0].is_cuda)


def _finite(value: Tensor, varies: Sequence[bool], i: int, j: int) -> float:
    if not (varies[i] and varies[j]):
        raise ValueError("the last hidden layer of a network does not vary over these images")
    if not bool(torch.isfinite(value)):
        raise ValueError("nothing of one side is left once it is centred")
    return float(value)


def _one_by_one(
    value: Callable[[int, int], float], pairs: Pairs, clock: Clock | None, *, threads: bool = False
) -> Found:
    """A failure on some pairs leaves those undefined; one on all pairs is the measure's own."""
    reasons: Counter[str] = Counter()
    errors: list[Exception] = []

    def of_pair(pair: tuple[int, int]) -> float:
        if clock is not None and clock.over:
            reasons[clock.reason] += 1
            return np.nan
        try:
            return value(*pair)
        except Exception as error:
            errors.append(error)
            reasons[f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)] += 1
            return np.nan

    with closing(_in_turn(of_pair, pairs, threads)) as in_turn:
        values = np.array(list(in_turn), dtype=np.float64)
    if errors and len(errors) == len(pairs) and not isinstance(errors[0], ValueError):
        raise errors[0]
    return Found(values, reasons)


def _in_turn(function: Callable[[tuple[int, int]], float], pairs: Pairs, threads: bool) -> Any:
    if threads and len(pairs) > 1:
        return side_by_side(function, pairs)
    return (function(pair) for pair in pairs)


def _of_weights(measure: Measure, models: Sequence[nn.Module], pairs: Pairs) -> Found:
    """From end to end where the measure reads maps; else the mean over layers, which both networks must have."""
    from ..weights import compare_weights
    from ..weights.layers import ALL

    whole = issubclass(measure.reads, LinearMaps)
    sites = {"sites_a": "output"} if whole else {}
    found = compare_weights(list(models), measures=measure, **sites) if whole and len(models) > 2 else None  # type: ignore[arg-type]

    def value(i: int, j: int) -> float:
        if isinstance(found, Comparisons) and i != j:
            pair = found.pairs[min(i, j), max(i, j)]
        else:
            own = {"sites_a": "output", "sites_b": "output"} if whole else {}
            pair = compare_weights(models[i], models[j], measures=measure, **own)  # type: ignore[arg-type,assignment]
        values = pair[measure.name].value
        if values.shape[0] != values.shape[1]:
            raise ValueError("the networks do not have the same tensors")
        # All tensors in a row have no spectrum, and count once already.
        layers = [k for k, site in enumerate(pair.sites_a) if whole or site != ALL]
        mean = float(np.mean(np.diagonal(values)[layers]))
        if not np.isfinite(mean):
            told = [c.text for c in pair[measure.name].caveats if whole or ALL not in (c.site_a, c.site_b)]
            raise ValueError(next(iter(told), "undefined"))
        return mean

    return _one_by_one(value, pairs, None)


def gather(parts: Iterable[Found]) -> Found:
    """Several lots, one after the other."""
    lots = list(parts)
    values = np.concatenate([lot.values for lot in lots]) if lots else np.zeros(0)
    return Found(values, sum((lot.reasons for lot in lots), Counter()))
