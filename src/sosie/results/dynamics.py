"""The similarity of a network at every time with every other time, site by site, for one run or two."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..checks import nearest
from ..files import check_schema
from ..notebook import html_figures
from .comparison import ESTIMATE, Estimate
from .storage import Array, Result, rebuilt, schema_of
from .tables import number

THRESHOLDS = (0.99, 0.999)


@dataclass(frozen=True)
class Order:
    """Sites in the order in which they settle; ties in order of depth, and sites that never settle last."""

    sites: tuple[str, ...]
    steps: tuple[int | None, ...]
    correlation: float | None  # Spearman's, of step with depth; None if all settle together or depth is unknown

    @property
    def bottom_up(self) -> bool | None:
        """Whether sites near the input tend to settle earlier; None if step and depth are unrelated."""
        return None if not self.correlation else self.correlation > 0


@dataclass(frozen=True, eq=False)
class Dynamics(Result):
    """Every recorded time compared with every other, for each site and measure.

    With two runs, rows are the times of A and columns those of B.
    """

    format = "sosie-dynamics"
    name_a: str
    name_b: str  # the same name if there is one run
    what: str  # atoms, weights or activations
    sites: tuple[str, ...]
    steps_a: tuple[int, ...]
    steps_b: tuple[int, ...]
    values: dict[str, Estimate]  # of each measure: value (sites, times of A, times of B), caveats by site_a
    two_runs: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)
    by_depth: bool = True  # whether sites are in order of depth; weights by name alone may not be

    def __post_init__(self) -> None:
        shape = (len(self.sites), len(self.steps_a), len(self.steps_b))
        for name, values in self.values.items():
            if values.value.shape != shape:
                raise ValueError(f"{name}: values of shape {values.value.shape}, sites and steps make it {shape}")
        if len(set(self.sites)) < len(self.sites):
            raise ValueError(f"a site is named twice: {self.sites}")
        for steps in (self.steps_a, self.steps_b):
            if any(earlier >= later for earlier, later in pairwise(steps)):
                raise ValueError(f"steps must increase: {steps}")
        if not self.two_runs and self.steps_a != self.steps_b:
            raise ValueError(f"one run has one list of steps, got {self.steps_a} and {self.steps_b}")

    @property
    def steps(self) -> list[int]:
        """The recorded steps (of A if there are two runs)."""
        return list(self.steps_a)

    @property
    def measures(self) -> list[str]:
        return list(self.values)

    def __getitem__(self, measure: str) -> Estimate:
        if measure not in self.values:
            raise KeyError(f"no values for {measure!r}{nearest(measure, self.values)}")
        return self.values[measure]

    def _only(self, measure: str | None) -> str:
        if measure is not None:
            return measure
        if not self.values:
            raise ValueError("nothing was measured")
        return next(iter(self.values))

    def matrix(self, measure: str | None = None) -> Array:
        """The values, (sites, times of A, times of B), by default of the first measure."""
        return self[self._only(measure)].value.copy()

    def to_end(self, measure: str | None = None) -> Array:
        """The value of each time with the last one (of B if there are two runs), (sites, times of A)."""
        return self[self._only(measure)].value[:, :, -1].copy()

    def settled(
        self, threshold: float = 0.99, measure: str | None = None, *, within: float | None = None
    ) -> dict[str, int | None]:
        """The first step from which on each site stays near its last state; None for sites that have not settled.

        Near means a similarity to the last state of at least `threshold`, at that step and at all later ones. For
        distances (lower is closer) `threshold` is the share of the way from the first state to the last: with 0.99, a
        hundredth of their distance is left; `within` sets a distance instead. A site that is near its last state
        only at the last step itself has not settled, as far as can be seen: every site is near itself. An undefined
        value is not near, so a site whose last state is undefined never settles.
        """
        if self.two_runs:
            raise ValueError("only one run settles, towards its own end: compute the dynamics of one run")
        values, to_end = self[self._only(measure)], self.to_end(measure)
        if within is not None and (values.closer == "up" or not within >= 0):
            raise ValueError(f"within={within!r}: a distance of at least 0, for measures where lower is closer")
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold={threshold!r}: from 0 to 1; within= gives a distance")
        steps: dict[str, int | None] = {}
        for site, row in zip(self.sites, to_end, strict=True):
            if values.closer == "up":
                reached = row >= threshold - 1e-12  # rounding must not delay it
            else:
                reached = row <= ((1 - threshold) * row[0] if within is None else within) + 1e-12
            late = np.flatnonzero(~reached)
            first = 0 if not late.size else int(late[-1]) + 1
            steps[site] = self.steps_a[first] if first < len(self.steps_a) - 1 else None
        return steps

    def order(self, threshold: float = 0.99, measure: str | None = None, *, within: float | None = None) -> Order:
        """The order in which sites settle, and its correlation with depth."""
        steps = self.settled(threshold, measure, within=within)
        place = {site: k for k, site in enumerate(self.sites)}
        sites = sorted(steps, key=lambda site: (math.inf if steps[site] is None else steps[site], place[site]))
        known = [(place[site], step) for site, step in steps.items() if step is not None]
        correlation = rank_correlation(known) if self.by_depth else None
        return Order(tuple(sites), tuple(steps[site] for site in sites), correlation)

    def rows(self) -> list[dict[str, Any]]:
        """One dict per measure, site and pair of times."""
        return [
            {
                "measure": name,
                "site": site,
                "step_a": a,
                "step_b": b,
                "value": float(values.value[s, i, j]),
                "n": values.n,
                "caveats": [c.text for c in values.caveats if c.site_a in (None, site)],
            }
            for name, values in self.values.items()
            for s, site in enumerate(self.sites)
            for i, a in enumerate(self.steps_a)
            for j, b in enumerate(self.steps_b)
        ]

    def summary_columns(self, measure: str) -> tuple[list[str], list[list[str]]]:
        """Titles, and a column of cells for each: the first state's value with the last, and when the site settles.

        With two runs: the values of A's first and last states with B's last.
        """
        ends = self.to_end(measure)
        first, last = ([number(value) for value in ends[:, k]] for k in (0, -1))
        if self.two_runs:
            return ["first", "last"], [first, last]
        settled = [self.settled(threshold, measure).values() for threshold in THRESHOLDS]
        columns = [["later" if step is None else str(step) for step in steps] for steps in settled]
        return ["first", *(f"settled at {threshold:g}" for threshold in THRESHOLDS)], [first, *columns]

    def as_json(self) -> dict[str, Any]:
        values = {name: each.as_json(["value"]) for name, each in self.values.items()}
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"values": values}

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | os.PathLike[str]) -> Dynamics:
        check_schema(path, content, schema_of(cls) | {"values": {str: ESTIMATE}})
        empty: Dynamics = rebuilt(cls, content | {"values": {}})
        shape = (len(empty.sites), len(empty.steps_a), len(empty.steps_b))
        values = {name: Estimate.from_json(each, shape) for name, each in content["values"].items()}
        return replace(empty, values=values)

    def __repr__(self) -> str:
        name = f"{self.name_a} x {self.name_b}" if self.two_runs else self.name_a
        return f"<Dynamics of {self.what}, {name}: {len(self.sites)} sites, {len(self.steps_a)} steps>"

    def _repr_html_(self) -> str:
        return html_figures(self)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's correlation, with mean ranks for ties; None for fewer than two pairs or a constant side."""
    from scipy.stats import rankdata

    if len(pairs) < 2:
        return None
    x, y = (rankdata(side) - (len(pairs) + 1) / 2 for side in zip(*pairs, strict=True))
    size = math.sqrt(float((x @ x) * (y @ y)))
    return float(x @ y) / size if size else None
