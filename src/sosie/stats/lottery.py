"""Which rows of a stream are kept, and how rows that are too wide are made narrower: seeded, whatever the order."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROWS = 2048  # rows kept by default
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's constants: 2^64 over the golden ratio,
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shifts and factors,
LAST_SHIFT = 31  # and a shift at the end


def row_hash(index: np.ndarray, seed: int) -> np.ndarray:
    """A fixed pseudo-random 64-bit number for each global row index (splitmix64's mixing)."""
    with np.errstate(over="ignore"):
        return _mixed(_mixed(index.astype(np.uint64) * np.uint64(GOLDEN)) ^ row_hash_start(seed))


def row_hash_start(seed: int) -> np.ndarray:
    """(1,) what a seed makes of the hashes."""
    with np.errstate(over="ignore"):
        return _mixed(np.array([seed % 2**64], dtype=np.uint64) + np.uint64(GOLDEN))


def _mixed(z: np.ndarray) -> np.ndarray:
    for shift, factor in MIXING:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(LAST_SHIFT))


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
        self.width, self.to, self.seed = width, to, seed
        self._wide: dict[torch.device, Tensor] = {}

    def __call__(self, rows: Tensor) -> Tensor:
        place = self.place(rows.device)
        added, taken = rows.new_zeros(len(rows), 2 * self.to).index_add_(1, place, rows).split(self.to, 1)
        return added - taken

    def place(self, device: torch.device) -> Tensor:
        """Where each column goes; sites of one width share it, and so do later sketches."""
        if self.width <= _REMEMBERED:
            return _remembered(self.width, self.to, self.seed, device)
        if device not in self._wide:
            self._wide[device] = _places(self.width, self.to, self.seed, device)
        return self._wide[device]


def _places(width: int, to: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + width)  # on the CPU: the same for every device
    length = -(-width // to)
    with torch.inference_mode(False):  # others may differentiate through what is remembered
        signs = torch.randint(0, 2, (width,), generator=generator)
        # What is taken off has places of its own, which saves a copy of the rows with signs.
        place = torch.randperm(to * length, generator=generator)[:width] // length + to * signs
        return place.to(device, non_blocking=True)


_REMEMBERED = 2**19  # columns up to which places are remembered: 4 MiB for one fold
_remembered = lru_cache(maxsize=32)(_places)
