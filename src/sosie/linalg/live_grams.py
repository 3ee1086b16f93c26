"""Centred Gram matrices that gradients flow through, and their inner products.

Of many layers together: on a GPU a step of training waits for the number of operations, not for what they compute.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import gram_cuda
from .centring import double_centred, u_centred
from .hsic import gram_stack, slices_of

STRIP = 2**21  # numbers that are widened and centred at a time
SMALL = 2**18  # numbers up to which rows are copied, to be done together with those of other layers
FEW = 64  # and how many rows at most: what is added up in the end are parts of n² numbers
WIDE = (torch.float32, torch.float64)
CHUNKS = 64, 1024  # features that are multiplied at a time, at least and at most


def widened(rows: Tensor) -> Tensor:
    """In float32 at least."""
    return rows if rows.dtype in WIDE else rows.float()


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
    return _Settled.apply(sized_gram(rows, centre=centre)[0], centre)[0]


def sized_gram(rows: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """(1, n, n): X Xᵀ as above, and n‖first row‖² (1,), or the mean's; for `inner_products`, which settles gradients.

    Compiled code is given plain operations: traced functions keep rows that are overwritten later unnoticed.
    """
    if not torch.compiler.is_compiling():
        return _Gram.apply(rows, centre)
    gram = centred_grams(rows) if centre else grams(widened(rows.clone()))
    return gram[None], len(rows) * _squared_size(rows[:1])


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


# Gram matrices


class _Gram(torch.autograd.Function):
    """Of one set of rows. The gradient it is given is taken for symmetric, and centred if the rows were."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, centre: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.centre = centre
        if gram_cuda.suits(rows[None]):
            gram, size = gram_cuda.gram_blocks(rows[None], centre=centre, tf32=False)
        else:
            gram, size = _by_strips(rows, centre)[None], len(rows) * _squared_size(rows[:1])
        ctx.mark_non_differentiable(size)
        ctx.set_materialize_grads(False)
        return gram, size

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        # A gradient that is rounded to bfloat16 in the end may be made in it: its exponents are those of float32.
        digits = rows.dtype if rows.dtype in (*WIDE, torch.bfloat16) else torch.float32
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


def _squared_size(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.detach(), dim=1, dtype=torch.float64).square()


class _Settled(torch.autograd.Function):
    """Gram matrices (…, n, n) as they are; a gradient of any kind becomes one for symmetric, and centred, matrices."""

    @staticmethod
    def forward(ctx: Any, grams: Tensor, centre: bool) -> Tensor:
        ctx.centre = centre
        return grams.view_as(grams)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        half = (gradients[0] + gradients[0].mT) / 2
        return double_centred(half) if ctx.centre else half, None


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
    squares = _squared_size(joined[0].view(-1, chunk))
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *stacks, shown = ctx.saved_tensors
        if gradients[0] is None:
            return None, None, *(None for _ in stacks)
        if torch.is_grad_enabled():  # the gradient of this gradient will be asked for
            grams = _Settled.apply(_float64(stacks), ctx.centre)
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
