"""Which bucket a row falls into and with which sign: seeded by its global index, so that two models share them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..checks import whole_number
from ..data.draws import row_bits, shifted
from ..linalg import for_numpy

_APART = 0x5CE7C4  # keeps these draws apart from those that decide which rows a sample keeps
_LARGEST = 2**40  # torch's generators take 64 bits, of which numbers of draws and widths need some
_WIDE = 2**13  # columns from which NumPy adds row by row as fast as torch adds all of them
_COPIED = 16 * 2**20  # bytes


def check_seed(seed: int) -> None:
    whole_number(seed, "the seed of a sketch", least=1 - _LARGEST, most=_LARGEST - 1)


@dataclass(frozen=True)
class Buckets:
    """A CountSketch S over rows, (size, n): one entry ±1 a row; with `stack` s of them, each of size / s, over √s.

    SᵀS has ones on its diagonal, and 0 ± 1/√size beside it.
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

    def draw(self, start: int, count: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """(stack, count) each: the buckets of the rows start … start + count, and their signs over √stack.

        Made on the device: a GPU has no copy to wait for.
        """
        index = torch.arange(start, start + count, device=device)
        hashes = torch.stack([row_bits((self.seed << 8) + k + (_APART << 32), index) for k in range(self.stack)])
        height = self.size // self.stack
        first = torch.arange(0, self.size, height, device=device)[:, None]
        signs = (hashes & 1).double() * 2 - 1
        return shifted(hashes, 1) % height + first, signs / self.stack**0.5


@dataclass(frozen=True)
class Drawn:
    """The buckets and signs of one chunk's rows."""

    buckets: Tensor  # (stack, rows)
    signs: Tensor  # float64
    _at: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Buckets and signs where the rows are and in their precision, made once."""
        key = rows.device, rows.dtype
        if key not in self._at:
            self._at[key] = self.buckets.to(rows.device), self.signs.to(rows.device, rows.dtype)
        return self._at[key]

    def add(self, total: Tensor, rows: Tensor, *, signed: bool = True) -> None:
        """total += S rows, in place; or with all signs +1."""
        buckets, signs = self.at(rows)
        for bucket, sign in zip(buckets, signs if signed else signs.abs(), strict=True):
            if for_numpy(rows) and rows.ndim == 2 and rows.shape[1] >= _WIDE:
                _add_wide(total.numpy(), bucket.tolist(), sign.tolist(), rows.numpy())
                continue
            factors = sign.reshape(-1, *[1] * (rows.ndim - 1))
            # How many rows to multiply by their signs at a time: a CPU takes few, since large copies are new pages.
            step = max(1, len(rows))
            if rows.device.type == "cpu" and len(rows):
                step = max(1, _COPIED // max(1, rows[0].numel() * rows.element_size()))
            for where, factor, some in zip(bucket.split(step), factors.split(step), rows.split(step), strict=True):
                total.index_add_(0, where, some * factor)


def _add_wide(total: np.ndarray, buckets: list[int], signs: list[float], rows: np.ndarray) -> None:
    """Row by row: no copy with signs is made, and no threads wait for each other, 250 times a chunk."""
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
        order, signs = self.order.to(gram.device), self.signs.to(gram.device)
        return gram[order][:, order] * signs[:, None] * signs

    def rows(self, rows: Tensor) -> Tensor:
        order, signs = self.order.to(rows.device), self.signs.to(rows.device)
        return rows[order] * signs.reshape(-1, *[1] * (rows.ndim - 1))
