"""Centred Gram matrices that gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import gram_cuda
from .centring import double_centred
from .hsic import gram_stack, slices_of

STRIP = 2**21  # numbers that are widened and centred at a time
FULL = (torch.float32, torch.float64)


def widened(rows: Tensor) -> Tensor:
    """In float32 at least."""
    return rows if rows.dtype in FULL else rows.float()


def centred_rows(rows: Tensor) -> Tensor:
    """Rows (…, n, p) less their mean, in float32 at least.

    The first row goes first, so that a large offset costs no digits and rows that are all equal become exactly 0.
    """
    rows = widened(rows)
    rows = rows - rows[..., :1, :].detach()  # a constant: what the mean takes off next does not depend on it
    return rows - rows.mean(-2, keepdim=True)


def centred_grams(rows: Tensor) -> Tensor:
    """(…, n, n): X Xᵀ of centred rows (…, n, p)."""
    return grams(centred_rows(rows))


def grams(rows: Tensor) -> Tensor:
    """(…, n, n): X Xᵀ of rows (…, n, p) as they are; a GPU shares out the features."""
    if not rows.is_cuda or (slices := slices_of(rows.shape[-1])) == 1:
        return rows @ rows.mT
    parts = rows.unflatten(-1, (slices, -1)).transpose(-2, -3)
    return (parts @ parts.mT).sum(-3)


def live_gram(rows: Tensor, *, centre: bool = True) -> Tensor:
    """(n, n): X Xᵀ of rows (n, p), centred or as they are, in float32 at least; no copy of the rows is made or kept."""
    return Settled.apply(sized_gram(rows, centre=centre)[0], centre)[0]


def sized_gram(rows: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """(1, n, n): X Xᵀ as above, and n‖first row‖² (1,), or the mean's; for `inner_products`, which settles gradients.

    Compiled code is given plain operations: traced functions keep rows that are overwritten later unnoticed.
    """
    if not torch.compiler.is_compiling():
        return _Gram.apply(rows, centre)
    gram = centred_grams(rows) if centre else grams(widened(rows.clone()))
    return gram[None], len(rows) * squared_sizes(rows[:1])


class _Gram(torch.autograd.Function):
    """Of one set of rows. The gradient it is given is taken for symmetric, and centred if the rows were."""

    @staticmethod
    def forward(rows: Tensor, centre: bool) -> tuple[Tensor, Tensor]:
        if gram_cuda.suits(rows[None]):
            gram, size = gram_cuda.gram_blocks(rows[None], about="mean" if centre else "nothing", tf32=False)
        else:
            gram, size = _by_strips(rows, centre)[None], len(rows) * squared_sizes(rows[:1])
        return gram, size

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
        rows, ctx.centre = inputs
        ctx.save_for_backward(rows)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (rows,) = ctx.saved_tensors
        if gradients[0] is None:
            return None, None
        # A gradient that is rounded to bfloat16 in the end may be made in it: its exponents are those of float32.
        digits = rows.dtype if rows.dtype in (*FULL, torch.bfloat16) else torch.float32
        pull = gradients[0][0].to(digits)
        found = []
        for part in _strips(rows):
            part = part.to(digits) - part[:1] if ctx.centre else part.to(digits)
            found.append(torch.addmm(part[:1], pull, part, beta=0, alpha=2).to(rows.dtype))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1), None


def _by_strips(rows: Tensor, centre: bool) -> Tensor:
    total = None
    for part in _strips(rows):
        part = centred_rows(part) if centre else widened(part)
        found = gram_stack(part.contiguous()[None])[0]
        total = found if total is None else total + found
    assert total is not None
    return total


def _strips(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, STRIP // len(rows)), dim=1)


def squared_sizes(rows: Tensor) -> Tensor:
    """‖row‖² (n,) in float64, without gradients."""
    return torch.linalg.vector_norm(rows.detach(), dim=1, dtype=torch.float64).square()


class Settled(torch.autograd.Function):
    """Gram matrices (…, n, n) as they are; a gradient of any kind becomes one for symmetric, and centred, matrices."""

    @staticmethod
    def forward(grams: Tensor, centre: bool) -> Tensor:
        return grams.view_as(grams)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        _, ctx.centre = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        half = (gradients[0] + gradients[0].mT) / 2
        return double_centred(half) if ctx.centre else half, None
