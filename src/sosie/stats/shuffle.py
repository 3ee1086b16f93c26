"""Shuffled pairing: what chance gives is measured by pairing each row of x with another row of y."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..linalg import once

# How something made from rows follows when the rows change places: a matrix of pairs of rows, one thing per row,
# the indices of each row's neighbours, or the upper triangle of a matrix of pairs.
Moves = Literal["square", "rows", "neighbours", "triangle"]


class Shuffle:
    """A new order of rows: row i is taken by row order[i]."""

    def __init__(self, order: Tensor) -> None:
        self.order = order

    @classmethod
    def draw(cls, n: int, seed: int, number: int, device: torch.device) -> Shuffle:
        """The draw of that number: the same whichever others are made."""
        return cls(torch.randperm(n, generator=_generator(seed, number)).to(device))

    @once
    def inverse(self) -> Tensor:
        return torch.argsort(self.order)

    @once
    def triangle(self) -> Tensor:
        """Where each entry of the upper triangle (row by row, diagonal left out) comes from."""
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
    """(draws, rows): new orders of the rows of one block of a stream, the same in whichever part it is read."""
    return torch.rand(draws, rows, generator=_generator(seed, block)).argsort(1)


def _generator(seed: int, number: int) -> torch.Generator:
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
    return torch.Generator().manual_seed(mixed)
