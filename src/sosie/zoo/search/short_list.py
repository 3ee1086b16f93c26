"""The models and rows of a short list, worked out from their vectors all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store import Mapped
from .plain import Whole

Table = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cosines:
    """Of the rows of some models with the sites of a query, model after model; −inf where atoms do not meet."""

    values: Table  # (rows of all, sites of the query)
    starts: Whole
    counts: Whole

    @classmethod
    def of(cls, mapped: Mapped, vectors: Table, places: Whole | None = None) -> Cosines:
        """`places`: a site meets only the row at this place among the model's own."""
        starts = np.cumsum(mapped.count) - mapped.count
        values = model_products(mapped, vectors)
        if places is not None:
            own = np.arange(len(values)) - np.repeat(starts, mapped.count)
            values[own[:, None] != places[None]] = -np.inf
        return cls(values, starts, mapped.count)

    def scores(self, symmetric: bool) -> Table:
        """For each model the mean over the query's sites of the largest; `symmetric`: and the other way, averaged."""
        best = np.maximum.reduceat(self.values, self.starts, axis=0)
        met = np.isfinite(best)
        forward = np.where(met, best, 0.0).sum(1) / met.sum(1)
        if not symmetric:
            return forward
        best = self.values.max(1)
        met = np.isfinite(best)
        back = np.add.reduceat(np.where(met, best, 0.0), self.starts) / np.add.reduceat(met, self.starts, dtype=int)
        found: Table = (forward + back) / 2
        return found

    def largest(self, k: int) -> tuple[int, int, float]:
        """Site of the query and row of model `k` that are most alike, and how much."""
        start = int(self.starts[k])
        table = self.values[start : start + int(self.counts[k])].T
        site, row = np.unravel_index(int(table.argmax()), table.shape)
        return int(site), int(row), float(table[site, row])


def model_products(mapped: Mapped, vectors: Table) -> Table:
    """(rows of all models, vectors), in float64: a model at a time, which a processor's cache holds."""
    mapped.verify()
    found = np.empty((int(mapped.count.sum()), len(vectors)))
    every = np.asarray(mapped.rows)
    wide = np.empty((int(mapped.count.max()), every.shape[1]))
    start = 0
    for first, count in zip(mapped.first.tolist(), mapped.count.tolist(), strict=True):
        wide[:count] = every[first : first + count]
        np.matmul(wide[:count], vectors.T, out=found[start : start + count])
        start += count
    return found


def row_products(mapped: Mapped, rows: Whole, vector: NDArray[Any]) -> Table:
    """Of rows of the file with one vector, in float64."""
    mapped.verify(mapped.owners(rows))
    found: Table = np.asarray(mapped.rows)[rows].astype(np.float64) @ vector.astype(np.float64)
    return found


def places_of(mapped: Mapped, models: Whole) -> tuple[Whole, NDArray[np.bool_]]:
    """Where models are among those that have rows, and whether they are; numbers go up with the rows."""
    if not len(mapped.models):
        return np.zeros(len(models), np.int64), np.zeros(len(models), bool)
    places: Whole = np.minimum(np.searchsorted(mapped.models, models), len(mapped.models) - 1)
    return places, mapped.models[places] == models
