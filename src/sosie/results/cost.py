"""What measures cost: data that can be read again without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .files import DamagedFile, read_json, write_json
from .storage import _list, _real, _text

COST = "sosie-cost"
COST_VERSION = 2


@dataclass(frozen=True)
class Cost:
    """One measure on one pair of models, on so many inputs; None where it needs none."""

    measure: str
    probes: int | None
    sites: int  # values: one a layer, of whole weights one a pair of layers
    forward_flops: int  # of both models
    measure_flops: int  # of the measure's own algebra
    seconds: float
    peak_bytes: int
    statistic: str  # what the values rest on
    unknown: tuple[str, ...] = ()  # operations that were run, but have no formula

    @property
    def flops(self) -> int:
        return self.forward_flops + self.measure_flops


@dataclass(frozen=True)
class Costs:
    """A row for each measure and number of inputs."""

    models: tuple[str, str]
    costs: tuple[Cost, ...]
    device: str
    memory: str  # what `peak_bytes` counts
    rows_rule: str
    provenance: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Cost]:
        return iter(self.costs)

    def __len__(self) -> int:
        return len(self.costs)

    def of(self, measure: str, probes: int | None = None) -> Cost:
        """The row of a measure; `probes` may be left out where it has one row."""
        found = [cost for cost in self.costs if cost.measure == measure and probes in (None, cost.probes)]
        if len(found) != 1:
            there = ", ".join(f"{cost.measure} ({cost.probes or 'no'} probes)" for cost in self.costs)
            raise KeyError(f"{len(found)} rows of {measure!r} with probes={probes}; there are {there}")
        return found[0]

    def ratios(self, measure: str, over: str) -> dict[int, float]:
        """Operations of one measure over those of another that needs no inputs, by number of inputs."""
        least = self.of(over).flops
        return {cost.probes: cost.flops / least for cost in self if cost.measure == measure and cost.probes is not None}

    def rows(self) -> list[dict[str, Any]]:
        return [{**asdict(cost), "flops": cost.flops, "unknown": list(cost.unknown)} for cost in self]

    def as_json(self) -> dict[str, Any]:
        return {"format": COST, "version": COST_VERSION, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        return write_json(path, self.as_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Costs:
        """What `save` wrote."""
        found = read_json(path, COST, COST_VERSION, "table of costs")
        try:
            return costs_from_json(found)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def costs_from_json(found: dict[str, Any]) -> Costs:
    first, second = map(_text, _list(found["models"]))
    names = ("device", "memory", "rows_rule")
    return Costs(
        (first, second),
        tuple(map(_cost, _list(found["costs"]))),
        **{name: _text(found[name]) for name in names},
        provenance=dict(found["provenance"]),
    )


def _cost(found: dict[str, Any]) -> Cost:
    seconds = _real(found["seconds"])
    if seconds < 0:
        raise ValueError(f"seconds is {seconds}")
    return Cost(
        measure=_text(found["measure"]),
        probes=None if found["probes"] is None else _count(found, "probes"),
        seconds=seconds,
        statistic=_text(found["statistic"]),
        unknown=tuple(map(_text, _list(found["unknown"]))),
        **{name: _count(found, name) for name in ("sites", "forward_flops", "measure_flops", "peak_bytes")},
    )


def _count(found: dict[str, Any], name: str) -> int:
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a whole number from 0 on")
    return value
