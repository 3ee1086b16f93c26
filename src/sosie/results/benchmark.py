"""The results of the benchmark and of cost measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from ..checks import nearest
from .storage import Result


@dataclass(frozen=True)
class Entry:
    """One measure: its results at each stage, and why some are missing.

    A value of `moved` is 0 if the measure has the value of a network with itself, and 1 if it has the value of
    untrained networks.
    """

    name: str
    of: str  # "activations" or "models"
    closer: str | None
    notes: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)  # stage -> why
    undefined: dict[str, str] = field(default_factory=dict)  # kind of pair -> why no such pair has a value
    calibration: dict[str, Any] | None = None
    grounding: dict[str, dict[str, Any]] = field(default_factory=dict)  # kind of pair -> correlations
    against: dict[str, dict[str, Any]] = field(default_factory=dict)  # kind of pair -> difference from the leader
    manipulation: dict[str, Any] | None = None

    @property
    def auc(self) -> float | None:
        """The share of cases where consecutive checkpoints are closer than untrained networks, on all images."""
        return None if self.calibration is None else self.calibration["clean"]["auc"]

    def correlation(self, coefficient: str = "spearman", group: str = "all") -> float | None:
        """The correlation with agreement, averaged over the kinds of pairs; None unless every kind has one."""
        coefficients = [kind["groups"][group].get(coefficient) for kind in self.grounding.values()]
        missing = self.undefined or any(name.startswith("grounding") for name in self.failures)
        if not coefficients or None in coefficients or missing:
            return None
        return fmean(coefficient["value"] for coefficient in coefficients)

    @property
    def moved_in_vain(self) -> float | None:
        """The largest move of the value while the function stayed the same: 0 is best."""
        moves = [abs(moved) for moved in self._moves(keeps=True)]
        return max(moves) if moves else None

    @property
    def noticed(self) -> float | None:
        """The move of the value when the function was broken: the mean over ways to break it, each from 0 to 1."""
        moves = self._moves(keeps=False)
        return fmean(min(max(moved, 0.0), 1.0) for moved in moves) if moves else None

    def _moves(self, *, keeps: bool) -> list[float]:
        tried = {} if self.manipulation is None else self.manipulation["manipulations"]
        return [t["moved"] for t in tried.values() if t["keeps"] is keeps and t.get("moved") is not None]

    @property
    def seconds(self) -> float | None:
        """The time for one pair, on the largest number of images."""
        return None if self.calibration is None else self.calibration["seconds"][-1][1]


@dataclass(frozen=True)
class Leaderboard(Result):
    """Measures, best first: by the mean over kinds of pairs of Spearman's ρ with agreement over all conditions."""

    format = "sosie-leaderboard"
    scale: dict[str, Any]
    data: dict[str, Any]
    pairs: dict[str, int]  # kind -> number of pairs
    conditions: dict[str, list[str]]  # group -> the conditions that it is the mean of
    entries: tuple[Entry, ...]
    left_out: dict[str, str]  # measures that were not tried -> why
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(sorted(self.entries, key=_order)))

    def __getitem__(self, name: str) -> Entry:
        entries = {entry.name: entry for entry in self.entries}
        if name not in entries:
            raise KeyError(f"no measure {name!r} on this leaderboard{nearest(name, entries)}")
        return entries[name]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def leader(self) -> str | None:
        """The measure that the others are compared with: the first one, if it has a rank."""
        return self.entries[0].name if self.entries and self.entries[0].correlation() is not None else None

    def rows(self) -> list[dict[str, Any]]:
        """One dict per measure: the numbers that sum it up."""
        return [
            {
                "rank": rank if entry.correlation() is not None else None,
                "measure": entry.name,
                "of": entry.of,
                "closer": entry.closer,
                "spearman": entry.correlation("spearman"),
                "pearson": entry.correlation("pearson"),
                "auc": entry.auc,
                "untrained": _mean(entry, "unlike"),
                "consecutive": _mean(entry, "alike"),
                "moved_in_vain": entry.moved_in_vain,
                "noticed": entry.noticed,
                "seconds": entry.seconds,
                "notes": list(entry.notes),
                "failures": dict(entry.failures),
                "undefined": dict(entry.undefined),
            }
            for rank, entry in enumerate(self.entries, 1)
        ]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": self.rows()}


def _order(entry: Entry) -> tuple[float, float, str]:
    value, auc = entry.correlation(), entry.auc
    return (2.0 if value is None else -value, 2.0 if auc is None else -auc, entry.name)


def _mean(entry: Entry, side: str) -> float | None:
    values = None if entry.calibration is None else entry.calibration["clean"][side]
    return None if values is None else values["mean"]


# The cost of measures


@dataclass(frozen=True)
class Cost:
    """The cost of one measure on one pair of models; `probes`: the number of inputs, None if it needs none."""

    measure: str
    probes: int | None
    sites: int  # values: one per layer, for whole weights one per pair of layers
    forward_flops: int  # of both models
    measure_flops: int  # of the measure's own algebra
    seconds: float
    peak_bytes: int
    statistic: str  # that the values rest on
    unknown: tuple[str, ...] = ()  # operations that were run, but have no formula

    @property
    def flops(self) -> int:
        return self.forward_flops + self.measure_flops


@dataclass(frozen=True)
class Costs(Result):
    """The costs of measures, one row per measure and number of inputs."""

    format = "sosie-cost"
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
        """The row of a measure; `probes` may be left out if it has one row."""
        rows = [cost for cost in self.costs if cost.measure == measure and probes in (None, cost.probes)]
        if len(rows) != 1:
            known = ", ".join(f"{cost.measure} ({cost.probes or 'no'} probes)" for cost in self.costs)
            raise KeyError(f"{len(rows)} rows of {measure!r} with probes={probes}; there are {known}")
        return rows[0]

    def ratios(self, measure: str, over: str) -> dict[int, float]:
        """FLOPs of one measure over those of another that needs no inputs, by number of inputs."""
        least = self.of(over).flops
        return {cost.probes: cost.flops / least for cost in self if cost.measure == measure and cost.probes is not None}

    def rows(self) -> list[dict[str, Any]]:
        return [{**asdict(cost), "flops": cost.flops, "unknown": list(cost.unknown)} for cost in self]
