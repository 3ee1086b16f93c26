"""Centred Gram matrices that gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hsic import gram_stack

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
    rows = centred_rows(rows)
    return rows @ rows.mT


def live_gram(rows: Tensor, *, centre: bool = True) -> Tensor:
    """(n, n): X Xᵀ of rows (n, p), centred or as they are, in float32 at least; no copy of the rows is made or kept.

    Compiled code is given plain operations: traced functions keep rows that are overwritten later unnoticed.
    """
    if torch.compiler.is_compiling():
        return centred_grams(rows) if centre else _plain_gram(widened(rows.clone()))
    return _Gram.apply(rows, centre)


def _plain_gram(rows: Tensor) -> Tensor:
    return rows @ rows.mT


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, centre: bool) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.centre = centre
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
        parts = (widened(part) - part[:1] if ctx.centre else widened(part) for part in _strips(rows))
        found = [(both @ part).to(rows.dtype) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1), None


def _strips(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, STRIP // len(rows)), dim=1)
