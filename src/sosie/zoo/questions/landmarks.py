"""A few models that stand for all: some drawn, then those that are least like any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..search.plain import Floats, Whole
from ..store import Mapped
from .similarities import similarities, square

BLOCK = 4096  # models that are held against landmarks at a time
ROUND = 50  # landmarks that are taken at a time
POOL = 500  # models that these are taken from


def held_against_some(mapped: Mapped, count: int, seed: int) -> tuple[Whole, Floats]:
    """Where landmarks are among the models, and the similarity of each model with them: (models, count).

    Half are drawn by `seed`. Of a group with few members none may be among these, so the rest are those farthest from
    all that were taken before: `ROUND` at a time, one after the other, out of the `POOL` that are farthest.
    """
    random = np.random.default_rng(seed)
    drawn = np.sort(random.choice(len(mapped.models), (count + 1) // 2, replace=False))
    similarity = np.empty((len(mapped.models), count), np.float32)
    near = np.full(len(mapped.models), -np.inf)
    chosen = np.empty(0, np.int64)
    new = drawn
    while len(new):
        columns = slice(len(chosen), len(chosen) + len(new))
        hold(mapped, new, similarity[:, columns])
        chosen = np.concatenate([chosen, new])
        near = np.maximum(near, similarity[:, columns].max(1))
        near[chosen] = np.inf
        new = farthest(mapped, near, min(ROUND, count - len(chosen)))
    return chosen, similarity


def hold(mapped: Mapped, chosen: Whole, into: Any) -> None:
    """The similarities of all models with some, a block at a time."""
    some = mapped.part(chosen)
    for start in range(0, len(mapped.models), BLOCK):
        into[start : start + BLOCK] = similarities(some, mapped.part(slice(start, start + BLOCK)))


def farthest(mapped: Mapped, near: NDArray[np.float64], count: int) -> Whole:
    """One after the other the model that is least like all before; `near`: the largest similarity of each so far."""
    if not count:
        return np.empty(0, np.int64)
    some = max(POOL, count)
    pool = np.sort(np.argpartition(near, some - 1)[:some]) if some < len(near) else np.arange(len(near))
    left, inner = near[pool].copy(), square(mapped.part(pool))
    found = []
    for _ in range(count):
        found.append(int(left.argmin()))
        left = np.maximum(left, inner[:, found[-1]])
        left[found] = np.inf
    return np.sort(pool[found])
