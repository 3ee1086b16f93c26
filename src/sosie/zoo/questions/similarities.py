"""How alike models are as wholes: every pair of two lists of them, from their short vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...results import Array
from ..fingerprints import kind_of
from ..search.plain import Floats, Whole
from ..search.there import check_kind, none_passes
from ..store import Mapped

if TYPE_CHECKING:
    from ..asking import Asking

TILE = 1024  # rows that are held against as many at a time: 4 MiB of cosines, which stay in the cache


def mapped_of(zoo: Asking, kind: str, **filters: Any) -> Mapped:
    """The vectors of a kind; of atoms those of the one set of coefficients that there is, or that is named."""
    check_kind(zoo, kind)
    keys = [key for key in zoo.views.kinds() if kind in (key, kind_of(key)) and key != "exact"]
    if len(keys) > 1:
        raise ValueError(
            f"models with {len(keys)} different sets of coefficients, whose atoms have nothing in common: name one of "
            f"{', '.join(keys)} as the kind"
        )
    found = zoo.views.of(keys[0] if keys else kind, **filters)
    if not len(found.models):
        raise none_passes(zoo, filters, f"no model that passes the filters has vectors of kind {kind!r}")
    return found


def similarities(some: Mapped, others: Mapped) -> Array:
    """(others, some): the mean over a model's sites of the best match among the other's, averaged over both ways.

    Atoms: the mean over layers of the cosine at the same layer.
    """
    found = np.empty((len(others.models), len(some.models)))
    columns = [Tile.of(some, chosen) for chosen in _tiles(some)]
    for chosen in _tiles(others):
        rows = Tile.of(others, chosen)
        for tile in columns:
            found[np.ix_(rows.models, tile.models)] = rows.match(tile)
    return found


def square(mapped: Mapped) -> Array:
    """All pairs, symmetric, with 1 for each with itself."""
    found = np.empty((len(mapped.models), len(mapped.models)))
    tiles = [Tile.of(mapped, chosen) for chosen in _tiles(mapped)]
    for k, rows in enumerate(tiles):
        for tile in tiles[k:]:  # the other half is the same numbers
            part = rows.match(tile)
            found[np.ix_(tile.models, rows.models)] = part.T
            found[np.ix_(rows.models, tile.models)] = part
    found = (found + found.T) / 2  # within a tile both are worked out, and rounded
    np.fill_diagonal(found, 1.0)
    return found


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows of some models, those with most sites first: the first row of each, then the second of each that has one …

    So the best of a model's rows is the largest of whole stretches of numbers, which is several times as fast as to
    look through each model's own.
    """

    models: Whole  # where they are among all
    rows: Floats
    stretches: tuple[tuple[int, int], ...]  # from which row on, of how many models
    count: Array  # sites of each
    atoms: bool

    @classmethod
    def of(cls, mapped: Mapped, chosen: Whole) -> Tile:
        mapped.verify(chosen)
        first, count = mapped.first[chosen], mapped.count[chosen]
        having = [int((count > place).sum()) for place in range(int(count[0]))]
        index = np.concatenate([first[:many] + place for place, many in enumerate(having)])
        starts = np.cumsum(having) - having
        stretches = tuple(zip(starts.tolist(), having, strict=True))
        rows = np.asarray(mapped.rows)[index]
        return cls(chosen, rows, stretches, count.astype(np.float64), kind_of(mapped.kind) == "atoms")

    def match(self, other: Tile) -> Array:
        """(models of this one, of the other)."""
        if self.atoms:
            return self._same_place(other)
        cosines = self.rows @ other.rows.T
        (_, many), *more = other.stretches
        best = cosines[:, :many].copy()  # (rows, models of the other)
        for start, some in more:
            np.maximum(best[:, :some], cosines[:, start : start + some], out=best[:, :some])
        forth = np.zeros((len(self.models), len(other.models)))
        for start, some in self.stretches:
            forth[:some] += best[start : start + some]
        (_, many), *more = self.stretches
        best = cosines[:many].copy()  # (models, rows of the other)
        for start, some in more:
            np.maximum(best[:some], cosines[start : start + some], out=best[:some])
        back = np.zeros_like(forth)
        for start, some in other.stretches:
            back[:, :some] += best[:, start : start + some]
        return (forth / self.count[:, None] + back / other.count[None]) / 2

    def _same_place(self, other: Tile) -> Array:
        """One set of coefficients, so one list of layers: every model has as many."""
        if len({*self.count, *other.count}) > 1:
            raise ValueError("models that share coefficients, but have different numbers of layers with atoms")
        pairs = zip(self.stretches, other.stretches, strict=True)
        total = np.zeros((len(self.models), len(other.models)))
        for (a, many), (b, others) in pairs:
            total += self.rows[a : a + many] @ other.rows[b : b + others].T
        return total / len(self.stretches)


def _tiles(mapped: Mapped) -> list[Whole]:
    """All models, those with most sites first, about `TILE` rows at a time."""
    order = np.argsort(-mapped.count, kind="stable")
    tile = (np.cumsum(mapped.count[order]) - 1) // TILE
    return np.split(order, np.flatnonzero(np.diff(tile)) + 1)
