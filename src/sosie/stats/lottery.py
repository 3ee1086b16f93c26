"""Which rows of a stream are kept, and how rows that are too wide are made narrower: seeded, whatever the order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROWS = 2048  # rows kept by default


def row_hash(index: np.ndarray, seed: int) -> np.ndarray:
    """A fixed pseudo-random 64-bit number for each global row index (splitmix64's mixing)."""
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed % 2**64], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        return _mixed(_mixed(index.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ start)


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Lottery:
    """Which rows of a stream are kept: those with the smallest hash of their global index.

    Shared by both models, so that the rows stay paired. Draws shrink as better rows are met; what was
    drawn too much is dropped when samples merge.
    """

    def __init__(self, rows: int = ROWS, seed: int = 0) -> None:
        if rows < 4:
            raise ValueError(f"a sample needs at least 4 rows, got {rows}")
        self.rows, self.seed = rows, seed
        self._best = np.empty(0, dtype=np.uint64)
        self._drawn: tuple[int, int] | None = None
        self._kept = np.empty(0, dtype=np.int64)

    def draw(self, start: int, count: int) -> np.ndarray:
        """Global indices kept of the rows start … start + count; asking twice for the same rows gives the same."""
        if self._drawn != (start, count):
            index = np.arange(start, start + count)
            hashes = row_hash(index, self.seed)
            self._best = np.sort(np.concatenate([self._best, hashes]))[: self.rows]
            if len(self._best) == self.rows:
                index = index[hashes <= self._best[-1]]
            self._drawn, self._kept = (start, count), index
        return self._kept


class Fold:
    """A seeded random projection of rows: signs, and sums of the columns that fall together, as evenly as can be.

    Inner products are kept on average; their relative error is about 1/√(columns left).
    """

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + width)
        length = -(-width // to)
        self.to = to
        signs = torch.randint(0, 2, (width,), generator=generator)
        # What is taken off has places of its own, which saves a copy of the rows with signs.
        self.place = torch.randperm(to * length, generator=generator)[:width] // length + to * signs

    def __call__(self, rows: Tensor) -> Tensor:
        self.place = self.place.to(rows.device)
        added, taken = rows.new_zeros(len(rows), 2 * self.to).index_add_(1, self.place, rows).split(self.to, 1)
        return added - taken
