"""Gram matrices of many layers at once, and their inner products, for gradients to flow through.

On a GPU a step of training waits for the number of its operations, not for what they compute.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .centring import double_centred, u_centred
from .live_grams import STRIP, Settled, sized_gram, squared_sizes, widened

SMALL = 2**18  # numbers up to which rows are copied, to be done together with those of other layers
FEW = 64  # and how many rows at most: what is added up in the end are parts of n² numbers
CHUNKS = 64, 1024  # features that are multiplied at a time, at least and at most


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
    return _InnerProducts.apply(centre, unbiased, *stacks)


# Of several layers at once: their features side by side, multiplied in chunks, and the chunks of a layer added up


def _runs(rows: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours that are done together: few rows each and not many numbers in all; or one set alone."""
    runs: list[list[Tensor]] = []
    room = 0
    for each in rows:
        small = len(each) <= FEW and each.numel() <= SMALL
        if not small or each.numel() > room:
            runs.append([])
            room = STRIP if small else 0
        runs[-1].append(each)
        room -= each.numel()
    return runs


def _joined_grams(rows: Sequence[Tensor], centre: bool) -> tuple[Tensor, Tensor]:
    least, most = CHUNKS
    chunk = max(least, math.gcd(most, *(each.shape[1] for each in rows)))
    joined = widened(torch.cat(_padded(rows, chunk), dim=1))
    counts = tuple(-(-each.shape[1] // chunk) for each in rows)
    owners = _owners(counts, joined.device)
    squares = squared_sizes(joined[0].view(-1, chunk))
    sizes = squares.new_zeros(len(rows)).index_add_(0, owners, squares, alpha=len(joined))
    if centre:
        joined = joined - joined[:1].detach()  # as in `centred_rows`; gradients pass as they are
    return _JoinedGrams.apply(joined, owners, counts, centre), sizes


def _padded(rows: Sequence[Tensor], chunk: int) -> list[Tensor]:
    """With zeros, which add nothing, up to whole chunks."""
    found = []
    for each in rows:
        found.append(each)
        if missing := -each.shape[1] % chunk:
            found.append(each.new_zeros(len(each), missing))
    return found


@functools.lru_cache(maxsize=64)
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Which layer each chunk is of; made once: to make it anew a GPU would be waited for."""
    with torch.inference_mode(False):  # whoever asks first, gradients can flow past it
        return torch.tensor([k for k, count in enumerate(counts) for _ in range(count)], device=device)


class _JoinedGrams(torch.autograd.Function):
    """(L, n, n) in float64, of joined rows (n, chunks × chunk); the gradient is taken for symmetric, and centred."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, owners: Tensor, counts: tuple[int, ...], centre: bool) -> Tensor:
        ctx.save_for_backward(joined, owners)
        rows = joined - joined.mean(0, keepdim=True) if centre else joined
        chunks = _in_chunks(rows, len(owners))
        parts = torch.bmm(chunks, chunks.mT)
        # Layer by layer, as a product with ones and zeros would take a NaN to all; neighbours of one width at once.
        widths = [(count, len(list(group))) for count, group in itertools.groupby(counts)]
        groups = parts.split([count * layers for count, layers in widths])
        sums = [
            group.unflatten(0, (-1, count)).sum(1, dtype=torch.float64)
            for group, (count, _) in zip(groups, widths, strict=True)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        joined, owners = ctx.saved_tensors
        pull = gradients[0].to(joined.dtype).index_select(0, owners)
        found = torch.baddbmm(pull[:, :1, :1], pull, _in_chunks(joined, len(owners)), beta=0, alpha=2)
        return found.transpose(0, 1).reshape(joined.shape), None, None, None


def _in_chunks(joined: Tensor, count: int) -> Tensor:
    """(chunks, n, features of a chunk)."""
    return joined.unflatten(1, (count, -1)).transpose(0, 1)


# Inner products


class _InnerProducts(torch.autograd.Function):
    """Centring and U-centring are orthogonal projections: what they made needs no second one on the way back.

    So the gradient of a Gram matrix is a sum of the others, symmetric and centred as they are.
    """

    @staticmethod
    def forward(ctx: Any, centre: bool, unbiased: bool, *stacks: Tensor) -> tuple[Tensor, Tensor]:
        grams = _float64(stacks)
        traces = grams.diagonal(dim1=1, dim2=2).sum(1)
        shown = u_centred(grams) if unbiased else grams
        ctx.save_for_backward(*stacks, shown)
        ctx.centre, ctx.unbiased = centre, unbiased
        flat = shown.flatten(1)
        ctx.mark_non_differentiable(traces)
        ctx.set_materialize_grads(False)
        return flat @ flat.T, traces

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *stacks, shown = ctx.saved_tensors
        if gradients[0] is None:
            return None, None, *(None for _ in stacks)
        if torch.is_grad_enabled():  # the gradient of this gradient will be asked for
            grams = Settled.apply(_float64(stacks), ctx.centre)
            shown = u_centred(grams) if ctx.unbiased else grams
        pull = gradients[0] + gradients[0].T
        found = (pull @ shown.flatten(1)).view_as(shown)
        if ctx.centre:  # what float32 left uncentred, where large terms of the sum cancel
            found = double_centred(found)
        if len({stack.dtype for stack in stacks}) == 1:
            found = found.to(stacks[0].dtype)  # all at once
        return None, None, *found.split([len(stack) for stack in stacks])


def _float64(stacks: Sequence[Tensor]) -> Tensor:
    return (stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))).double()
