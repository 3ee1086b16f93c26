"""Gram matrices of many layers at once, and their inner products, for gradients to flow through.

On a GPU a step of training waits for the number of its operations, not for what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .centring import double_centred, u_centred
from .live_grams import STRIP, Settled, sized_gram, squared_sizes, widened

SMALL = 2**18  # numbers up to which rows are copied, to be done together with those of other layers
FEW = 64  # and how many rows at most: what is added up in the end are parts of n² numbers
CHUNK = 1024  # features that are multiplied at a time


def sized_grams(rows: Sequence[Tensor], *, centre: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The same of many sets of as many rows, in order: stacks (k, n, n) and (k,). Small ones are done together."""
    stacks, sizes = [], []
    for run in _runs(rows):
        stack, size = sized_gram(run[0], centre=centre) if len(run) == 1 else _joined_grams(run, centre)
        stacks.append(stack)
        sizes.append(size)
    return stacks, sizes


def inner_products(stacks: Sequence[Tensor], *, centre: bool, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """(L, L) in float64: ⟨K, K'⟩ of all Gram matrices of the stacks (k, n, n), U-centred if `unbiased`.

    And their traces (L,), before U-centring and without gradients.
    """
    products, traces, _ = _InnerProducts.apply(centre, unbiased, *stacks)
    return products, traces


# Of several layers at once: their rows side by side, each filled up with zeros, which add nothing, to one width


def _runs(rows: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours that are done together: few rows each and not many numbers in all; or one set alone."""
    runs: list[list[Tensor]] = []
    widest = 0
    for each in rows:
        small = len(each) <= FEW and each.numel() <= SMALL
        if not (small and widest and max(widest, each.numel()) * (len(runs[-1]) + 1) <= STRIP):
            runs.append([])
            widest = 0
        runs[-1].append(each)
        widest = max(widest, each.numel()) if small else 0
    return runs


def _joined_grams(rows: Sequence[Tensor], centre: bool) -> tuple[Tensor, Tensor]:
    count, width = len(rows[0]), max(each.shape[1] for each in rows)
    width += -width % min(CHUNK, width)
    joined = widened(torch.cat(_filled_up(rows, width), dim=1))
    sizes = count * squared_sizes(joined[0].view(-1, width))
    if centre:
        joined = joined - joined[:1].detach()  # as in `centred_rows`; gradients pass as they are
    return _JoinedGrams.apply(joined, width, centre), sizes


def _filled_up(rows: Sequence[Tensor], width: int) -> list[Tensor]:
    missing = [width - each.shape[1] for each in rows]
    zeros = rows[0].new_zeros(len(rows[0]), max(missing))
    fill = {count: zeros[:, :count] for count in set(missing)}
    return [part for each, count in zip(rows, missing, strict=True) for part in (each, fill[count]) if part.shape[1]]


class _JoinedGrams(torch.autograd.Function):
    """(L, n, n) in float64, of joined rows (n, L × width); the gradient is taken for symmetric, and centred."""

    @staticmethod
    def forward(joined: Tensor, width: int, centre: bool) -> Tensor:
        rows = joined - joined.mean(0, keepdim=True) if centre else joined
        # In chunks, which a GPU shares out, and added up in float64.
        chunks = _layers(rows, min(CHUNK, width))
        parts = torch.bmm(chunks, chunks.mT)
        return parts.unflatten(0, (joined.shape[1] // width, -1)).sum(1, dtype=torch.float64)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, bool], output: Tensor) -> None:
        joined, ctx.width, _ = inputs
        ctx.save_for_backward(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (joined,) = ctx.saved_tensors
        pull = gradients[0].to(joined.dtype)
        found = torch.baddbmm(pull[:, :1, :1], pull, _layers(joined, ctx.width), beta=0, alpha=2)
        return found.transpose(0, 1).reshape(joined.shape), None, None


def _layers(joined: Tensor, width: int) -> Tensor:
    """(L, n, width)."""
    return joined.unflatten(1, (-1, width)).transpose(0, 1)


# Inner products


class _InnerProducts(torch.autograd.Function):
    """Centring and U-centring are orthogonal projections: what they made needs no second one on the way back.

    So the gradient of a Gram matrix is a sum of the others, symmetric and centred as they are.
    """

    @staticmethod
    def forward(centre: bool, unbiased: bool, *stacks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grams = _float64(stacks)
        traces = grams.diagonal(dim1=1, dim2=2).sum(1)
        flat = (u_centred(grams) if unbiased else grams).flatten(1)
        return flat @ flat.T, traces, flat

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.centre, ctx.unbiased, *stacks = inputs
        _, traces, flat = output
        ctx.save_for_backward(*stacks, flat)
        ctx.mark_non_differentiable(traces, flat)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *stacks, flat = ctx.saved_tensors
        if gradients[0] is None:
            return None, None, *(None for _ in stacks)
        if torch.is_grad_enabled():  # the gradient of this gradient will be asked for
            grams = Settled.apply(_float64(stacks), ctx.centre)
            flat = (u_centred(grams) if ctx.unbiased else grams).flatten(1)
        pull = gradients[0] + gradients[0].T
        found = (pull @ flat).view(-1, *stacks[0].shape[1:])
        if ctx.centre:  # what float32 left uncentred, where large terms of the sum cancel
            found = double_centred(found)
        if len({stack.dtype for stack in stacks}) == 1:
            found = found.to(stacks[0].dtype)  # all at once
        return None, None, *found.split([len(stack) for stack in stacks])


def _float64(stacks: Sequence[Tensor]) -> Tensor:
    return (stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))).double()
