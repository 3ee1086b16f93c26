"""From the biased to the unbiased HSIC and back, and Gram matrices of blocks of rows.

With Kc, Lc the centred Gram matrices of n rows, κ = Σ Kc_ii Lc_ii and tr the traces,

    n (n − 3) HSIC_u = ⟨Kc, Lc⟩ − n/(n−2) κ + tr Kc tr Lc / ((n−1)(n−2)).
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIP = 16  # columns of a Gram matrix that are made at a time on a CPU
SLICES = 4  # parts that the features of a single block are shared out in


def diagonal_part(kappa: Tensor, trace_x: Tensor, trace_y: Tensor, n: int) -> Tensor:
    """What the diagonals add to ⟨Kc, Lc⟩ over n (n − 3) HSIC_u."""
    return n / (n - 2) * kappa - trace_x * trace_y / ((n - 1) * (n - 2))


def block_stacks(rows: Tensor, block: int) -> list[Tensor]:
    """Consecutive blocks of rows as stacks (blocks, b, p), without copying; a remainder joins the last block.

    One stack of the whole blocks and, where a remainder was left, one of the last block alone.
    """
    n, width = rows.shape
    whole, rest = divmod(n, block)
    if rest == 0:
        return [rows.reshape(whole, block, width)]
    if whole <= 1:
        return [rows.reshape(1, n, width)]
    cut = (whole - 1) * block
    return [rows[:cut].reshape(whole - 1, block, width), rows[cut:].reshape(1, n - cut, width)]


def gram_stack(stack: Tensor) -> Tensor:
    """X Xᵀ for a stack (blocks, b, p); on a CPU most of what symmetry repeats is left out."""
    blocks, b, width = stack.shape
    if stack.is_cuda:
        return _in_slices(stack)
    if b <= STRIP or width < 4 * b:
        return torch.bmm(stack, stack.transpose(1, 2))
    if blocks == 1 and width % SLICES == 0:  # one block would leave cores idle: share out its features
        slices = stack.reshape(b, SLICES, width // SLICES).transpose(0, 1)
        return _mirrored(_upper(slices).sum(0, keepdim=True))
    return _mirrored(_upper(stack))


def _in_slices(stack: Tensor) -> Tensor:
    """Products of slices of the features, then their sum: one product so long and thin leaves a GPU idle."""
    _, b, width = stack.shape
    slices = slices_of(width)
    parts = [block.reshape(b, slices, width // slices).transpose(0, 1) for block in stack]
    return torch.stack([torch.bmm(part, part.transpose(1, 2)).sum(0) for part in parts])


def slices_of(width: int) -> int:
    """Into how many slices a GPU is given so many features."""
    return next(s for s in (128, 64, 32, 16, 8, 4, 2, 1) if width % s == 0 and (width >= 256 * s or s == 1))


def _upper(stack: Tensor) -> Tensor:
    """The upper triangle of X Xᵀ and a little more, a strip of columns at a time."""
    blocks, b, _ = stack.shape
    gram = stack.new_zeros(blocks, b, b)
    for start in range(0, b, STRIP):
        stop = min(start + STRIP, b)
        gram[:, :stop, start:stop] = torch.bmm(stack[:, :stop], stack[:, start:stop].transpose(1, 2))
    return gram


def _mirrored(upper: Tensor) -> Tensor:
    return upper.triu() + upper.triu(1).transpose(1, 2)
