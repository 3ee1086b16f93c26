"""How alike models are as wholes: every pair of two lists of them, from their short vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...results import Array
from ..fingerprints import kind_of
from ..search.plain import blocks
from ..store import Mapped

if TYPE_CHECKING:
    from ..asking import Asking

MOST_PRODUCTS = 2**24  # cosines that are held at a time


def mapped_of(zoo: Asking, kind: str, **filters: Any) -> Mapped:
    """The vectors of a kind; of atoms those of the one set of coefficients that there is, or that is named."""
    keys = [key for key in zoo.store.kinds() if kind in (key, kind_of(key)) and key != "exact"]
    if len(keys) > 1:
        raise ValueError(
            f"models with {len(keys)} different sets of coefficients, whose atoms have nothing in common: name one of "
            f"{', '.join(keys)} as the kind"
        )
    found = zoo.views.of(keys[0] if keys else kind, **filters)
    if not len(found.models):
        raise ValueError(f"no model of {zoo.folder} has vectors of kind {kind!r} and passes the filters")
    return found


def similarities(some: Mapped, others: Mapped) -> Array:
    """(others, some): the mean over a model's sites of the best match among the other's, averaged over both ways.

    Atoms: the mean over layers of the cosine at the same layer.
    """
    right = np.asarray(some.rows[some.index()])
    starts = np.cumsum(some.count) - some.count
    found = np.empty((len(others.models), len(some.models)))
    for start, stop, rows in blocks(others, max(MOST_PRODUCTS // len(right), 1)):
        counts = others.count[start:stop]
        cosines = rows @ right.T
        firsts = np.cumsum(counts) - counts
        if kind_of(some.kind) == "atoms":
            found[start:stop] = _same_place(cosines, firsts, counts, starts, some.count)
            continue
        best = np.maximum.reduceat(cosines, starts, axis=1)  # (rows, models of `some`)
        forth = np.add.reduceat(best, firsts, axis=0, dtype=np.float64) / counts[:, None]
        best = np.maximum.reduceat(cosines, firsts, axis=0)  # (models of the block, rows of `some`)
        back = np.add.reduceat(best, starts, axis=1, dtype=np.float64) / some.count[None]
        found[start:stop] = (forth + back) / 2
    return found


def _same_place(cosines: Any, firsts: Any, counts: Any, starts: Any, others: Any) -> NDArray[np.float64]:
    """One set of coefficients, so one list of layers: every model has as many."""
    if len(set(counts.tolist()) | set(others.tolist())) > 1:
        raise ValueError("models that share coefficients, but have different numbers of layers with atoms")
    places = range(int(counts[0]))
    total = sum(cosines[np.ix_(firsts + k, starts + k)].astype(np.float64) for k in places)
    found: NDArray[np.float64] = total / len(places)
    return found


def square(mapped: Mapped) -> Array:
    """All pairs, symmetric, with 1 for each with itself."""
    found = similarities(mapped, mapped)
    found = (found + found.T) / 2
    np.fill_diagonal(found, 1.0)
    return found
