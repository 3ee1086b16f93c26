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
    """A seeded random projection of wide rows: signs, a shuffle, and sums of the columns that fall together.

    Inner products are kept on average; their relative error is about 1/√width.
    """

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + width)
        length = -(-width // to)
        self.to, self.length = to, length
        self.order = torch.randperm(width, generator=generator)
        self.signs = torch.randint(0, 2, (width,), generator=generator, dtype=torch.int8) * 2 - 1

    def __call__(self, rows: Tensor) -> Tensor:
        order, signs = self.order.to(rows.device), self.signs.to(rows.device)
        shuffled = (rows * signs)[:, order]
        padded = torch.nn.functional.pad(shuffled, (0, self.to * self.length - rows.shape[1]))
        return padded.reshape(len(rows), self.to, self.length).sum(-1)
