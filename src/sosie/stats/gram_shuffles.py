"""Inner products of the Gram matrices of blocks whose rows were shuffled on one side: what chance gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gram_parts import GramSide
from .shuffle import orders_within_blocks

AT_ONCE = 2**24  # numbers of shuffled Gram matrices made at a time


@dataclass(frozen=True)
class ShuffledSums:
    """Sums over blocks for D draws; one draw is one new order of the rows for all pairs of A and B sites."""

    debiased: Tensor  # (D, A, B)
    diagonal: Tensor  # (D, A, B)
    raw: Tensor | None = None
    raw_diagonal: Tensor | None = None

    @classmethod
    def of(cls, a: GramSide, b: GramSide, *, draws: int, seed: int, first_block: int) -> ShuffledSums:
        orders = _orders(a, draws, seed, first_block)
        return cls(
            debiased=_squares(a.debiased, b.debiased, orders),
            diagonal=_vectors(a.diagonal, b.diagonal, orders),
            raw=_squares(a.raw, b.raw, orders) if a.raw else None,
            raw_diagonal=_vectors(a.raw_diagonal, b.raw_diagonal, orders) if a.raw else None,
        )

    def __add__(self, other: ShuffledSums) -> ShuffledSums:
        if self.debiased.shape != other.debiased.shape:
            raise ValueError(f"{len(self.debiased)} and {len(other.debiased)} draws of shuffled rows do not add up")
        raw = None if self.raw is None or other.raw is None else self.raw + other.raw
        on = None if self.raw_diagonal is None or other.raw_diagonal is None else self.raw_diagonal + other.raw_diagonal
        return ShuffledSums(self.debiased + other.debiased, self.diagonal + other.diagonal, raw, on)


def _orders(side: GramSide, draws: int, seed: int, first_block: int) -> list[Tensor]:
    """For each stack (blocks, draws, b): new orders of the rows."""
    found, block = [], first_block
    for count, size in side.sizes:
        orders = [orders_within_blocks(seed, block + k, draws, size) for k in range(count)]
        found.append(torch.stack(orders).to(side.length.device))
        block += count
    return found


def _squares(xs: list[Tensor], ys: list[Tensor], orders: list[Tensor]) -> Tensor:
    """Σ K ∘ L over blocks and draws, from stacks (blocks, sites, b·b) of matrices with nothing on the diagonal.

    The side with fewer sites is shuffled; half of each matrix says all of it.
    """
    if xs[0].shape[1] > ys[0].shape[1]:
        return _squares(ys, xs, orders).transpose(1, 2)
    total = xs[0].new_zeros(orders[0].shape[1], xs[0].shape[1], ys[0].shape[1])
    size_x, size_y = _sizes(xs), _sizes(ys)
    for x, y, order in zip(xs, ys, orders, strict=True):
        blocks, _, b = order.shape
        i, j = torch.triu_indices(b, b, 1, device=order.device)
        upper = (y[:, :, i * b + j] / size_y).float()  # (blocks, B, pairs): draws need no more digits
        few = max(1, AT_ONCE // (x.shape[1] * len(i)))
        for block in range(blocks):
            source = (x[block] / size_x).float()
            parts = []
            for some in order[block].split(few):
                moved = source[:, some[:, i] * b + some[:, j]]  # (A, draws, pairs)
                parts.append(2 * (moved @ upper[block].T).transpose(0, 1))
            total += torch.cat(parts)
    return total * (size_x * size_y.T)


def _sizes(stacks: list[Tensor]) -> Tensor:
    """(sites, 1): the power of 2 near the largest entry of each site, which brings all into the range of float32."""
    largest = torch.stack([stack.abs().amax((0, 2)) for stack in stacks]).amax(0)[:, None]
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


def _vectors(xs: list[Tensor], ys: list[Tensor], orders: list[Tensor]) -> Tensor:
    """The same for what is on the diagonals, stacks (blocks, sites, b)."""
    if xs[0].shape[1] > ys[0].shape[1]:  # so that both are shuffled alike
        return _vectors(ys, xs, orders).transpose(1, 2)
    total = xs[0].new_zeros(orders[0].shape[1], xs[0].shape[1], ys[0].shape[1])
    for x, y, order in zip(xs, ys, orders, strict=True):
        for block in range(len(order)):
            total += (x[block][:, order[block]] @ y[block].T).transpose(0, 1)
    return total
