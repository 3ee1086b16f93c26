"""Seeded draws over rows: which rows are kept, how they are shuffled, which columns or rows are summed.

A draw depends on the row's index in the whole data, so that models share it and any part of the data can be read alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..checks import whole_number
from ..data.draws import row_bits, shifted
from ..linalg import for_numpy, once

# The rows of a stream that are kept, and projections of rows that are too wide

ROWS = 2048  # rows kept by default


def row_hash(index: np.ndarray, seed: int) -> np.ndarray:
    """A fixed pseudo-random 64-bit number for each global row index (splitmix64's mixing)."""
    return row_bits(seed, torch.from_numpy(np.asarray(index, dtype=np.int64))).numpy().view(np.uint64)


_DEALT = 0xDEA17  # keeps groups of rows apart from the rows that a sample keeps


def dealt_groups(index: Tensor, groups: int) -> Tensor:
    """The group of each row by a hash of its global index: unrelated to the order that rows come in."""
    return shifted(row_bits(_DEALT, index), 1) % groups


def dealt_evenly(n: int, groups: int) -> Tensor:
    """(n,) The group of each of n rows: groups of equal size, unrelated to the order of the rows."""
    order = np.argsort(row_hash(np.arange(n), _DEALT), kind="stable")
    group = torch.empty(n, dtype=torch.int64)
    group[torch.from_numpy(order)] = torch.arange(n) % groups
    return group


class RowSampler:
    """Keeps the rows of a stream with the smallest hashes of their global index.

    Both models share it, so that rows stay paired. Draws shrink as smaller hashes come; merging drops the excess.
    """

    def __init__(self, rows: int = ROWS, seed: int = 0, *, of: int | None = None) -> None:
        """`of`: how many rows there will be, if that is known; then few are drawn that will not be kept."""
        if rows < 4:
            raise ValueError(f"a sample needs at least 4 rows, got {rows}")
        self.rows, self.seed = rows, seed
        share = 1.0 if not of else min(1.0, (rows + 5 * rows**0.5) / of)
        self._highest = np.uint64(min(int(share * 2**64), 2**64 - 1))
        self._best = np.empty(0, dtype=np.uint64)
        self._drawn: tuple[int, int] | None = None
        self._kept = np.empty(0, dtype=np.int64)

    def draw(self, start: int, count: int) -> np.ndarray:
        """The global indices kept of the rows start … start + count; a second call for the same rows agrees."""
        if self._drawn != (start, count):
            index = np.arange(start, start + count)
            hashes = row_hash(index, self.seed)
            low = hashes <= self._highest
            index, hashes = index[low], hashes[low]
            if len(index):
                self._best = np.sort(np.concatenate([self._best, hashes]))[: self.rows]
            if len(self._best) == self.rows:
                index = index[hashes <= self._best[-1]]
            self._drawn, self._kept = (start, count), index
        return self._kept


class Fold:
    """A seeded random projection of rows: sums of columns with random signs, equally many in each.

    Inner products are preserved on average; their relative error is about 1/√to.
    """

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        self.width, self.to, self.seed = width, to, seed
        self._wide: dict[torch.device, Tensor] = {}

    def __call__(self, rows: Tensor) -> Tensor:
        place = self.place(rows.device)
        positive, negative = rows.new_zeros(len(rows), 2 * self.to).index_add_(1, place, rows).split(self.to, 1)
        return positive - negative

    def place(self, device: torch.device) -> Tensor:
        """The sum that each column goes to; sites of one width share it, and so do later sketches."""
        if self.width <= _REMEMBERED:
            return _remembered(self.width, self.to, self.seed, device)
        if device not in self._wide:
            self._wide[device] = _places(self.width, self.to, self.seed, device)
        return self._wide[device]


def _places(width: int, to: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + width)  # on the CPU, so that all devices agree
    length = -(-width // to)
    with torch.inference_mode(False):  # others may differentiate through what is cached
        signs = torch.randint(0, 2, (width,), generator=generator)
        # Columns of negative sign have sums of their own, which saves a copy of the rows with signs.
        place = torch.randperm(to * length, generator=generator)[:width] // length + to * signs
        return place.to(device, non_blocking=True)


_REMEMBERED = 2**19  # columns up to which places are cached: 4 MiB for one fold
_remembered = lru_cache(maxsize=32)(_places)


# Shuffled pairing: chance is measured by pairing each row of x with another row of y

# How a result follows when its rows are shuffled: a matrix of pairs of rows, one entry per row, the indices of each
# row's neighbours, or the upper triangle of a matrix of pairs.
Moves = Literal["square", "rows", "neighbours", "triangle"]


class Shuffle:
    """A new order of rows: row order[i] moves to place i."""

    def __init__(self, order: Tensor) -> None:
        self.order = order

    @classmethod
    def draw(cls, n: int, seed: int, number: int, device: torch.device) -> Shuffle:
        """The draw of that number, whichever others are made."""
        return cls(torch.randperm(n, generator=_generator(seed, number)).to(device))

    @once
    def inverse(self) -> Tensor:
        return torch.argsort(self.order)

    @once
    def triangle(self) -> Tensor:
        """The source of each entry of the upper triangle (row by row, without the diagonal)."""
        n = len(self.order)
        i, j = torch.triu_indices(n, n, 1, device=self.order.device)
        a, b = self.order[i], self.order[j]
        low, high = torch.minimum(a, b), torch.maximum(a, b)
        return low * (2 * n - low - 1) // 2 + high - low - 1

    def __call__(self, thing: Tensor, moves: Moves) -> Tensor:
        if moves == "square":
            return thing[self.order][:, self.order]
        if moves == "neighbours":
            return self.inverse[thing[self.order]]
        return thing[self.triangle if moves == "triangle" else self.order]


def orders_within_blocks(seed: int, block: int, draws: int, rows: int) -> Tensor:
    """(draws, rows): new orders of the rows of one block of a stream, in whichever part it is read."""
    return torch.rand(draws, rows, generator=_generator(seed, block)).argsort(1)


def _generator(seed: int, number: int) -> torch.Generator:
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
    return torch.Generator().manual_seed(mixed)


# Sketches: rows are summed in buckets, each with a sign

_APART = 0x5CE7C4  # separates these draws from those of the rows that a sample keeps
_LARGEST = 2**40  # torch's generators take 64 bits, some of which are for numbers of draws and widths
_WIDE = 2**13  # columns from which NumPy adds row by row as fast as torch adds all rows
_COPIED = 16 * 2**20  # bytes


def check_seed(seed: int) -> None:
    whole_number(seed, "the seed of a sketch", least=1 - _LARGEST, most=_LARGEST - 1)


@dataclass(frozen=True)
class Buckets:
    """A CountSketch S over rows, (size, n): one entry ±1 per row; or a stack of s of them, each of size / s, over √s.

    SᵀS has 1 on its diagonal, and 0 ± 1/√size elsewhere.
    """

    size: int
    seed: int = 0
    stack: int = 1

    def __post_init__(self) -> None:
        whole_number(self.size, "the size of a sketch", least=2)
        whole_number(self.stack, "the stack of a sketch", least=1)
        check_seed(self.seed)
        if self.size % self.stack:
            raise ValueError(f"stack={self.stack} does not divide the size {self.size} of the sketch")

    def draw(self, start: int, count: int, device: torch.device | None = None) -> Placement:
        """The buckets of the rows start … start + count, and their signs over √stack.

        Made on the device, so that a GPU waits for no copy.
        """
        index = torch.arange(start, start + count, device=device)
        hashes = torch.stack([row_bits((self.seed << 8) + k + (_APART << 32), index) for k in range(self.stack)])
        height = self.size // self.stack
        first = torch.arange(0, self.size, height, device=device)[:, None]
        signs = (hashes & 1).double() * 2 - 1
        return Placement(shifted(hashes, 1) % height + first, signs / self.stack**0.5)


@dataclass(frozen=True)
class Placement:
    """The buckets and signs of one chunk's rows."""

    buckets: Tensor  # (stack, rows)
    signs: Tensor  # (stack, rows), float64
    _at: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Buckets and signs on the device of the rows and in their precision, made once."""
        key = rows.device, rows.dtype
        if key not in self._at:
            self._at[key] = self.buckets.to(rows.device), self.signs.to(rows.device, rows.dtype)
        return self._at[key]

    def add(self, total: Tensor, rows: Tensor, *, signed: bool = True) -> None:
        """Add S rows to the total in place; unsigned, with all signs +1."""
        buckets, signs = self.at(rows)
        for bucket, sign in zip(buckets, signs if signed else signs.abs(), strict=True):
            if for_numpy(rows) and rows.ndim == 2 and rows.shape[1] >= _WIDE:
                _add_wide(total.numpy(), bucket.tolist(), sign.tolist(), rows.numpy())
                continue
            factors = sign.reshape(-1, *[1] * (rows.ndim - 1))
            # A CPU multiplies few rows by their signs at a time, since large copies are new pages.
            step = max(1, len(rows))
            if rows.device.type == "cpu" and len(rows):
                step = max(1, _COPIED // max(1, rows[0].numel() * rows.element_size()))
            for where, factor, some in zip(bucket.split(step), factors.split(step), rows.split(step), strict=True):
                total.index_add_(0, where, some * factor)


def _add_wide(total: np.ndarray, buckets: list[int], signs: list[float], rows: np.ndarray) -> None:
    """Row by row, without a copy with signs, and without threads that wait for each other 250 times a chunk."""
    for bucket, sign, row in zip(buckets, signs, rows, strict=True):
        place = total[bucket]
        if sign == 1:
            np.add(place, row, out=place)
        elif sign == -1:
            np.subtract(place, row, out=place)
        else:
            place += row * total.dtype.type(sign)


@dataclass(frozen=True)
class Resketch:
    """A draw of other buckets and signs for one side, as if no row were shared."""

    order: Tensor  # (M,)
    signs: Tensor  # (M,) ±1

    @classmethod
    def draw(cls, height: int, seed: int, number: int, *, signed: bool = True) -> Resketch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number + 1)
        order = torch.randperm(height, generator=generator)
        signs = torch.randint(0, 2, (height,), generator=generator).double() * 2 - 1
        return cls(order, signs if signed else torch.ones_like(signs))

    def gram(self, gram: Tensor) -> Tensor:
        order, signs = self.order.to(gram.device), self.signs.to(gram.device)
        return gram[order][:, order] * signs[:, None] * signs

    def rows(self, rows: Tensor) -> Tensor:
        order, signs = self.order.to(rows.device), self.signs.to(rows.device)
        return rows[order] * signs.reshape(-1, *[1] * (rows.ndim - 1))
