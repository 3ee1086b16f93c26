"""Exact search: products of a few vectors with all rows of a file, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store import Mapped

BLOCK = 4096  # rows at a time: 4 MiB at 256 numbers, so that memory does not grow with the zoo
WORTH = 8  # a view of a row costs nothing, a copy as much as a product: an eighth of a block is taken as it lies
STACK = 32  # rows of one small product, which BLAS does not copy into a layout of its own first: half of the time

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]


def blocks(mapped: Mapped, most: int = BLOCK) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Whole models, about `most` rows at a time: from which to which model, and their rows; a view where it can be."""
    ends = np.cumsum(mapped.count)
    gaps = (
        np.flatnonzero(mapped.first[1:] != (mapped.first + mapped.count)[:-1]) + 1
    )  # models that follow on others' rows
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
        gap = int(np.searchsorted(gaps, start, side="right"))
        if gap < len(gaps) and gaps[gap] < stop and WORTH * (int(ends[gaps[gap] - 1]) - before) >= most:
            stop = int(gaps[gap])
        mapped.verify(slice(start, stop))
        first, last = int(mapped.first[start]), int(mapped.first[stop - 1] + mapped.count[stop - 1])
        if last - first == int(ends[stop - 1]) - before:
            yield start, stop, np.asarray(mapped.rows[first:last])
        else:
            some = mapped.part(slice(start, stop))
            yield start, stop, np.asarray(mapped.rows[some.index()])
        start = stop


def score_models(query: Floats, mapped: Mapped, places: Whole | None = None, *, symmetric: bool = False) -> Floats:
    """For each model the mean over the query's sites of the best cosine among the model's.

    `symmetric`: and that the other way round, averaged. `places`: vectors meet only where the model's has this place
    among its own; −inf where none does.
    """
    found = np.empty(len(mapped.models), np.float32)
    turned = np.ascontiguousarray(query.T)
    for start, stop, rows in blocks(mapped):
        counts = mapped.count[start:stop]
        starts = np.cumsum(counts) - counts
        cosines = stacked(rows, turned)  # (rows, sites of the query)
        if places is not None:
            found[start:stop] = _at_places(cosines, starts, counts, places)
            continue
        scores = best_of_each(cosines, starts, counts).mean(1)
        if symmetric:
            scores = (scores + np.add.reduceat(cosines.max(1), starts) / counts) / 2
        found[start:stop] = scores
    return found


def stacked(rows: Floats, turned: Floats) -> Floats:
    """rows @ turned, for a few columns."""
    found = np.empty((len(rows), turned.shape[1]), np.float32)
    even = len(rows) - len(rows) % STACK
    shape = even // STACK, STACK, -1
    if even:
        np.matmul(rows[:even].reshape(shape), turned, out=found[:even].reshape(shape))
    np.matmul(rows[even:], turned, out=found[even:])
    return found


def best_of_each(cosines: Floats, starts: Whole, counts: Whole) -> Floats:
    """The largest of each model's rows: (models, sites of the query)."""
    if (counts == counts[0]).all():  # much the faster way where all have as many
        apart = cosines.reshape(len(counts), int(counts[0]), -1)
        best: Floats = apart[:, 0].copy()
        for k in range(1, apart.shape[1]):
            np.maximum(best, apart[:, k], out=best)
        return best
    found: Floats = np.maximum.reduceat(cosines, starts, axis=0)
    return found


def _at_places(cosines: Floats, starts: Whole, counts: Whole, places: Whole) -> Floats:
    there = places[None] < counts[:, None]
    rows = np.where(there, starts[:, None] + places[None], 0)
    picked = np.where(there, cosines[rows, np.arange(len(places))[None]], 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = picked.sum(1) / there.sum(1)
    return np.where(there.any(1), scores, -np.inf).astype(np.float32)


def nearest_rows(query: Floats, mapped: Mapped, k: int, places: Whole | None = None) -> tuple[Whole, Floats]:
    """For each vector of the query the `k` nearest rows, nearest first: (sites, k) row numbers, and cosines.

    Fewer where there are fewer; −inf, with row −1, where `places` leave fewer.
    """
    rows = np.empty((len(query), 0), np.int64)
    values = np.empty((len(query), 0), np.float32)
    turned = np.ascontiguousarray(query.T)
    for start, stop, some in blocks(mapped):
        part = mapped.part(slice(start, stop))
        numbers = part.index()
        cosines = np.ascontiguousarray(stacked(some, turned).T)
        if places is not None:
            place = numbers - np.repeat(part.first, part.count)
            cosines[places[:, None] != place[None]] = -np.inf
        if values.shape[1] == k:  # most blocks have few that are near enough
            near = np.flatnonzero((cosines > values[:, -1:]).any(0))
            numbers, cosines = numbers[near], cosines[:, near]
        rows, values = merge(rows, values, np.broadcast_to(numbers, cosines.shape), cosines, k)
    return np.where(np.isneginf(values), -1, rows), values


def merge(rows: Whole, values: Floats, more: Whole, cosines: Floats, k: int) -> tuple[Whole, Floats]:
    """The `k` largest of both, largest first."""
    rows, values = np.concatenate([rows, more], 1), np.concatenate([values, cosines], 1)
    if values.shape[1] > k:
        best = np.argpartition(-values, k - 1, axis=1)[:, :k]
        rows, values = np.take_along_axis(rows, best, 1), np.take_along_axis(values, best, 1)
    order = np.lexsort((rows, -values), axis=1)
    return np.take_along_axis(rows, order, 1), np.take_along_axis(values, order, 1)
