"""Whether rows come in an order: blocks of consecutive rows cannot stand data that are sorted by class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

COLUMNS = 32  # of each site that are looked at


@dataclass(frozen=True)
class Drift:
    """Sums over a few columns of every site: S sites, C columns. They tell spread within blocks from spread between."""

    total: Tensor  # (S, C) Σ x
    squares: Tensor  # (S, C) Σ x²
    by_block: Tensor  # (S, C) Σ over blocks of (Σ x)² / rows

    @classmethod
    def of(cls, rows: Tensor, sizes: tuple[tuple[int, int], ...]) -> Drift:
        """From rows (n, S, C) that were cut into so many blocks of so many rows: ((blocks, b), …)."""
        rows = rows.double()
        stacks = rows.split([count * b for count, b in sizes])
        sums = [
            stack.reshape(count, b, *rows.shape[1:]).sum(1) for stack, (count, b) in zip(stacks, sizes, strict=True)
        ]
        by_block = sum(s.square().sum(0) / b for s, (_, b) in zip(sums, sizes, strict=True))
        assert isinstance(by_block, Tensor)
        return cls(rows.sum(0), rows.square().sum(0), by_block)

    def __add__(self, other: Drift) -> Drift:
        return Drift(self.total + other.total, self.squares + other.squares, self.by_block + other.by_block)

    def ratios(self, n: int, blocks: int) -> Tensor:
        """(S,): the variance between blocks over that within, each by its degrees of freedom; about 1 in no order."""
        between = (self.by_block - self.total.square() / n).sum(1) / (blocks - 1)
        within = (self.squares - self.by_block).sum(1) / (n - blocks)
        return torch.where(within > 0, between / within, torch.where(between > 0, torch.inf, 1.0).to(between))


@cache
def columns(width: int, device: torch.device) -> Tensor:
    """Which columns of a site are looked at: the same for all parts of the data."""
    if width <= COLUMNS:
        return torch.arange(COLUMNS, device=device) % width
    generator = torch.Generator().manual_seed(width)
    return torch.randperm(width, generator=generator)[:COLUMNS].sort().values.to(device)
