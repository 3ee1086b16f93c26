"""Centring of rows and of Gram matrices, Gram matrices of blocks of rows and with gradients, distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import gram_cuda
from .products import column_squares, for_numpy, row_squares, self_product


def centred(rows: Tensor) -> Tensor:
    """Rows (…, n, p) less their mean."""
    return rows - rows.mean(dim=-2, keepdim=True)


def without_mean(rows: Tensor) -> Tensor:
    """Less the mean, which is taken in float64 so that a large offset costs no digits."""
    if not for_numpy(rows):
        return rows - rows.mean(0, keepdim=True, dtype=torch.float64).to(rows.dtype)
    array = rows.numpy()
    with np.errstate(all="ignore"):
        mean = array.mean(0, dtype=np.float64).astype(array.dtype)
        found = array - mean
        # NumPy adds up row by row, which loses digits where there are many. What is left of the mean is subtracted too,
        # unless a few rows show that its square is below 1e-16 of the variance.
        left = len(array) ** 1.5 * np.finfo(array.dtype).eps * np.abs(mean)
        if (np.abs(found[:8]).max(0) < 1e8 * left).any():
            found -= found.mean(0, dtype=np.float64).astype(array.dtype)
    return torch.from_numpy(found)


def without_rounding(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Centred rows, where a neuron that only rounding keeps from being constant counts as constant."""
    digits = rows.dtype if rows.dtype == torch.float64 else torch.float32  # that the rows came in
    found = without_mean(rows.to(dtype))
    if rows.is_cuda or _may_be_rounding(rows.detach(), found.detach(), digits):
        noise = 8 * torch.finfo(digits).eps * rows.detach().abs().amax(0)
        found = torch.where(found.detach().abs().amax(0) > noise, found, torch.zeros_like(found))
    return found


def _may_be_rounding(rows: Tensor, found: Tensor, digits: torch.dtype) -> bool:
    """Whether a neuron may vary by rounding alone; hardly ever, and means and variances are enough to rule it out."""
    # max |x − mean| is at least the standard deviation and at most √n times that.
    deviation = (column_squares(found) / len(found)).sqrt()
    largest = rows[0].abs() + 2 * len(rows) ** 0.5 * deviation
    return not bool((deviation > 9 * torch.finfo(digits).eps * largest).all())


def double_centred(gram: Tensor) -> Tensor:
    """HKH for Gram matrices (…, n, n): what the rows' centring would have given."""
    row = gram.mean(dim=-1, keepdim=True)
    found = gram - (row - row.mean(dim=-2, keepdim=True))
    found -= row.transpose(-1, -2)  # in place: these are large
    return found


def centred_diagonal(gram: Tensor) -> Tensor:
    """The diagonal (…, n) of HKH, without making the rest."""
    row = gram.mean(dim=-1)
    return gram.diagonal(dim1=-2, dim2=-1) - 2 * row + row.mean(dim=-1, keepdim=True)


def u_centred(gram: Tensor) -> Tensor:
    """Székely and Rizzo's U-centring of symmetric Gram matrices (…, n, n); the diagonal becomes zero.

    ⟨u_centred(K), u_centred(L)⟩ / (n (n − 3)) is the unbiased estimate of HSIC; needs n ≥ 4.
    """
    n = gram.shape[-1]
    if n < 4:
        raise ValueError(f"U-centring needs at least 4 rows, got {n}")
    hollow = without_diagonal(gram)
    row = hollow.sum(dim=-1, keepdim=True) / (n - 2)
    total = row.sum(dim=-2, keepdim=True) / (n - 1)
    hollow -= row - total  # in place: for many sites together these are large
    hollow -= row.transpose(-1, -2)
    hollow.diagonal(dim1=-2, dim2=-1).zero_()
    return hollow


def without_diagonal(gram: Tensor) -> Tensor:
    n = gram.shape[-1]
    return gram.masked_fill(torch.eye(n, dtype=torch.bool, device=gram.device), 0.0)


# From the biased to the unbiased HSIC and back, and Gram matrices of blocks of rows
#
# With Kc, Lc the centred Gram matrices of n rows, κ = Σ Kc_ii Lc_ii and tr the traces,
#
#     n (n − 3) HSIC_u = ⟨Kc, Lc⟩ − n/(n−2) κ + tr Kc tr Lc / ((n−1)(n−2)).

STRIP = 16  # columns of a Gram matrix that are made at a time on a CPU
SLICES = 4  # parts that the features of a single block are shared out in


def diagonal_part(kappa: Tensor, trace_x: Tensor, trace_y: Tensor, n: int | Tensor) -> Tensor:
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


# Euclidean distances between all rows

NEAR = 1e-2  # of ‖x‖² + ‖y‖², below which ‖x − y‖² is taken from the difference: at most two digits are lost above
MANY = 0.1  # share of pairs that are near, from which on all are taken from their differences
AT_A_TIME = 2**18  # entries of such differences


def distances(rows: Tensor) -> Tensor:
    """(n, n), with all digits also where rows are close."""
    return squared_distances(rows).sqrt_()


def squared_distances(rows: Tensor) -> Tensor:
    """(n, n), by way of inner products; from differences between rows that are close, where those would lose digits."""
    x = centred(rows)  # distances do not change, but their rounding does
    lengths = row_squares(x)
    found = self_product(x.T).mul_(-2).add_(lengths[:, None]).add_(lengths)  # in place: these are large
    found.fill_diagonal_(torch.inf)
    if bool(found.amin() < 2 * NEAR * lengths.amax()):  # rules it out for most
        _take_differences(found, rows, lengths)
    return found.fill_diagonal_(0)


def _take_differences(found: Tensor, rows: Tensor, lengths: Tensor) -> None:
    """Where rows are close, as rows come: their mean may be far from all of them."""
    i, j = (found < NEAR * (lengths[:, None] + lengths)).triu_(1).nonzero(as_tuple=True)
    if len(i) > MANY * len(rows) ** 2 / 2:
        i, j = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
        found[i, j] = found[j, i] = torch.pdist(rows).square_()
        return
    step = max(AT_A_TIME // rows.shape[1], 1)
    for a, b in zip(i.split(step), j.split(step), strict=True):
        found[a, b] = found[b, a] = row_squares(rows[a] - rows[b])


def upper_triangle(square: Tensor) -> Tensor:
    """(n (n − 1) / 2,): what lies above the diagonal of (n, n), row by row."""
    if for_numpy(square):
        from scipy.spatial.distance import squareform

        return torch.from_numpy(squareform(square.numpy(), checks=False))
    i, j = torch.triu_indices(len(square), len(square), 1, device=square.device)
    return square[i, j]


# Mean and variance of ⟨K, P L Pᵀ⟩ over all permutations P, for centred symmetric K and L, in closed form
#
# Kazi-Aoual, Hitier, Sabatier and Lebreton (1995) give them for the RV coefficient, which linear CKA is.


@dataclass(frozen=True)
class Invariants:
    """What the moments depend on; shapes broadcast over pairs of sites."""

    trace: Tensor  # Σ Kᵢᵢ
    norm: Tensor  # Σ Kᵢⱼ²
    diagonal: Tensor  # Σ Kᵢᵢ²


def permuted_moments(k: Invariants, l: Invariants, n: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of ⟨K, P L Pᵀ⟩; needs at least 4 rows."""
    n = float(n)  # products of five of them do not fit into an integer
    mean = k.trace * l.trace / (n - 1)
    spread = 2 * _spectral(k, n) * _spectral(l, n) / ((n - 1) ** 2 * (n + 1) * (n - 2))
    return mean, spread + _diagonal(k, n) * _diagonal(l, n) / ((n + 1) * n * (n - 1) * (n - 2) * (n - 3))


def _spectral(m: Invariants, n: float) -> Tensor:
    return (n - 1) * m.norm - m.trace.square()


def _diagonal(m: Invariants, n: float) -> Tensor:
    return n * (n + 1) * m.diagonal - (n - 1) * (m.trace.square() + 2 * m.norm)


# Centred Gram matrices that gradients flow through

WIDENED = 2**21  # numbers that are widened and centred at a time
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
    return rows.split(max(1, WIDENED // len(rows)), dim=1)


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
