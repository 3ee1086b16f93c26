"""Which bucket a row falls into and with which sign: seeded by its global index, so that two models share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..lottery import row_hash

_APART = 0x5CE7C4  # keeps these draws apart from those that decide which rows a sample keeps
_LARGEST = 2**40  # torch's generators take 64 bits, of which numbers of draws and widths need some


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= _LARGEST:
        raise ValueError(f"a sketch needs a whole number as seed, less than 2^40 in size, got {seed!r}")


@dataclass(frozen=True)
class Buckets:
    """A CountSketch S over rows, (size, n): one entry ±1 a row; with `stack` s of them, each of size / s, over √s.

    SᵀS has ones on its diagonal, and 0 ± 1/√size beside it.
    """

    size: int
    seed: int = 0
    stack: int = 1

    def __post_init__(self) -> None:
        for name, least in (("size", 2), ("stack", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"a sketch needs a whole number as {name}, at least {least}, got {value!r}")
        check_seed(self.seed)
        if self.size % self.stack:
            raise ValueError(f"stack={self.stack} does not divide the size {self.size} of the sketch")

    def draw(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """(stack, count) each: the buckets of the rows start … start + count, and their signs over √stack."""
        index = np.arange(start, start + count)
        hashes = np.stack([row_hash(index, (self.seed << 8) + k + (_APART << 32)) for k in range(self.stack)])
        height = self.size // self.stack
        buckets = (hashes >> np.uint64(1)) % np.uint64(height) + np.arange(self.stack, dtype=np.uint64)[
            :, None
        ] * height
        signs = (hashes & np.uint64(1)).astype(np.float64) * 2 - 1
        return torch.from_numpy(buckets.astype(np.int64)), torch.from_numpy(signs / self.stack**0.5)


@dataclass(frozen=True)
class Drawn:
    """The buckets and signs of one chunk's rows, on the device where the rows are."""

    buckets: Tensor  # (stack, rows)
    signs: Tensor

    def to(self, rows: Tensor) -> Drawn:
        return Drawn(self.buckets.to(rows.device), self.signs.to(rows.device, rows.dtype))

    def add(self, total: Tensor, rows: Tensor) -> None:
        """total += S rows, in place."""
        at = self.to(rows)
        for bucket, sign in zip(at.buckets, at.signs, strict=True):
            total.index_add_(0, bucket, rows * sign.reshape(-1, *[1] * (rows.ndim - 1)))

    def add_apart(self, total: Tensor, rows: Tensor) -> None:
        """The same for wide rows, without a copy of them: total (2 size, …) holds what is added, then what is taken."""
        size = len(total) // 2
        for bucket, sign in zip(self.buckets, self.signs, strict=True):
            total.index_add_(0, bucket + size * (sign < 0), rows)

    def together(self, total: Tensor) -> Tensor:
        """S rows, from what `add_apart` made."""
        added, taken = total.chunk(2)
        return (added - taken) / len(self.buckets) ** 0.5

    def add_unsigned(self, total: Tensor, rows: Tensor) -> None:
        """The same with all signs +1."""
        at = self.to(rows)
        for bucket, sign in zip(at.buckets, at.signs.abs(), strict=True):
            total.index_add_(0, bucket, rows * sign.reshape(-1, *[1] * (rows.ndim - 1)))


@dataclass(frozen=True)
class Resketch:
    """A draw of other buckets and signs for one side, as rows that have nothing in common would get."""

    order: Tensor  # (M,)
    signs: Tensor  # (M,) ±1

    @classmethod
    def draw(cls, height: int, seed: int, number: int, *, signed: bool = True) -> Resketch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number + 1)
        order = torch.randperm(height, generator=generator)
        signs = torch.randint(0, 2, (height,), generator=generator).double() * 2 - 1
        return cls(order, signs if signed else torch.ones_like(signs))

    def gram(self, gram: Tensor) -> Tensor:
        return gram[self.order][:, self.order] * self.signs[:, None] * self.signs

    def rows(self, rows: Tensor) -> Tensor:
        return rows[self.order] * self.signs.reshape(-1, *[1] * (rows.ndim - 1))
