"""From the biased to the unbiased HSIC and back, and Gram matrices of blocks of rows.

With Kc, Lc the centred Gram matrices of n rows, κ = Σ Kc_ii Lc_ii and tr the traces,

    n (n − 3) HSIC_u = ⟨Kc, Lc⟩ − n/(n−2) κ + tr Kc tr Lc / ((n−1)(n−2)).
"""

from __future__ import annotations

import torch
from torch import Tensor


def diagonal_part(kappa: Tensor, trace_x: Tensor, trace_y: Tensor, n: int) -> Tensor:
    """What the diagonals add to ⟨Kc, Lc⟩ over n (n − 3) HSIC_u."""
    return n / (n - 2) * kappa - trace_x * trace_y / ((n - 1) * (n - 2))


def block_grams(rows: Tensor, block: int) -> list[Tensor]:
    """Gram matrices of consecutive blocks of rows; a remainder joins the last block.

    Returns stacks (blocks, b, b): one of the whole blocks and, where a remainder was left, one of the last.
    """
    return [gram_stack(stack) for stack in block_stacks(rows, block)]


def block_stacks(rows: Tensor, block: int) -> list[Tensor]:
    """The rows as stacks (blocks, b, p), without copying."""
    n, width = rows.shape
    whole, rest = divmod(n, block)
    if rest == 0:
        return [rows.reshape(whole, block, width)]
    if whole <= 1:
        return [rows.reshape(1, n, width)]
    cut = (whole - 1) * block
    return [rows[:cut].reshape(whole - 1, block, width), rows[cut:].reshape(1, n - cut, width)]


def gram_stack(stack: Tensor) -> Tensor:
    """X Xᵀ for a stack (blocks, b, p); on a CPU half of what symmetry repeats is left out."""
    blocks, b, width = stack.shape
    if stack.is_cuda or b < 128 or b % 2 or stack.requires_grad:
        return torch.bmm(stack, stack.transpose(1, 2))
    # Two half-size products on the diagonal and one beside it are 3/4 of the work of the whole.
    halves = stack.reshape(blocks, 2, b // 2, width)
    first, second = halves[:, 0], halves[:, 1]
    beside = torch.bmm(first, second.transpose(1, 2))
    top = torch.cat([torch.bmm(first, first.transpose(1, 2)), beside], dim=2)
    bottom = torch.cat([beside.transpose(1, 2), torch.bmm(second, second.transpose(1, 2))], dim=2)
    return torch.cat([top, bottom], dim=1)
