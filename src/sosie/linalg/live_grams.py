"""Centred Gram matrices that gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import gram_cuda
from .hsic import gram_stack, slices_of

STRIP = 2**21  # numbers that are widened and centred at a time


def widened(rows: Tensor) -> Tensor:
    """In float32 at least."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


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
    """(n, n): X Xᵀ of rows (n, p), centred or as they are, in float32 at least; no copy of the rows is made or kept.

    Compiled code is given plain operations: traced functions keep rows that are overwritten later unnoticed.
    """
    if torch.compiler.is_compiling():
        return centred_grams(rows) if centre else grams(widened(rows.clone()))
    return _Gram.apply(rows, centre)


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, centre: bool) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.centre = centre
        if gram_cuda.suits(rows[None]):
            return gram_cuda.gram_blocks(rows[None], about="mean" if centre else "nothing", tf32=False)[0][0]
        total = None
        for part in _strips(rows):
            part = centred_rows(part) if centre else widened(part)
            found = gram_stack(part.contiguous()[None])[0]
            total = found if total is None else total + found
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        both = gradients[0] + gradients[0].T
        if ctx.centre:
            both = both - both.mean(0, keepdim=True)
            both = both - both.mean(1, keepdim=True)
        # A gradient that is rounded to bfloat16 in the end may be made in it: its exponents are those of float32.
        digits = rows.dtype if rows.dtype == torch.bfloat16 else torch.promote_types(rows.dtype, torch.float32)
        both = both.to(digits)
        parts = (part.to(digits) - part[:1] if ctx.centre else part.to(digits) for part in _strips(rows))
        found = [(both @ part).to(rows.dtype) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1), None


def _strips(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, STRIP // len(rows)), dim=1)
