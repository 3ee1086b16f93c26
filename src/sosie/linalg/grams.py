"""Centring of rows and Gram matrices, Gram matrices of blocks of rows and with gradients, distances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
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
    """Rows (n, p) less their mean, which is taken in float64 so that a large offset costs no digits."""
    if not for_numpy(rows):
        return rows - rows.mean(0, keepdim=True, dtype=torch.float64).to(rows.dtype)
    array = rows.numpy()
    with np.errstate(all="ignore"):
        mean = array.mean(0, dtype=np.float64).astype(array.dtype)
        about = array - mean
        # NumPy sums row by row, which loses digits for many rows. The rest of the mean is subtracted too, unless a few
        # rows show that its square is below 1e-16 of the variance.
        rest = len(array) ** 1.5 * np.finfo(array.dtype).eps * np.abs(mean)
        if (np.abs(about[:8]).max(0) < 1e8 * rest).any():
            about -= about.mean(0, dtype=np.float64).astype(array.dtype)
    return torch.from_numpy(about)


def without_rounding(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Centred rows, with 0 for a neuron that varies by rounding alone."""
    digits = rows.dtype if rows.dtype == torch.float64 else torch.float32  # the precision of the rows
    about = without_mean(rows.to(dtype))
    if rows.is_cuda or _may_be_rounding(rows.detach(), about.detach(), digits):
        noise = 8 * torch.finfo(digits).eps * rows.detach().abs().amax(0)
        about = torch.where(about.detach().abs().amax(0) > noise, about, torch.zeros_like(about))
    return about


def _may_be_rounding(rows: Tensor, about: Tensor, digits: torch.dtype) -> bool:
    """Return whether a neuron may vary by rounding alone, which means and variances mostly rule out."""
    # max |x − mean| is at least the standard deviation and at most √n times that.
    deviation = (column_squares(about) / len(about)).sqrt()
    largest = rows[0].abs() + 2 * len(rows) ** 0.5 * deviation
    return not bool((deviation > 9 * torch.finfo(digits).eps * largest).all())


def double_centred(gram: Tensor) -> Tensor:
    """HKH for Gram matrices (…, n, n), the Gram matrices of centred rows."""
    row = gram.mean(dim=-1, keepdim=True)
    result = gram - (row - row.mean(dim=-2, keepdim=True))
    result -= row.transpose(-1, -2)  # in place, since these are large
    return result


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
    hollow -= row - total  # in place, since these are large for many sites
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
SLICES = 4  # of the features of a single block


def diagonal_part(kappa: Tensor, trace_x: Tensor, trace_y: Tensor, n: int | Tensor) -> Tensor:
    """⟨Kc, Lc⟩ − n (n − 3) HSIC_u, the contribution of the diagonals."""
    return n / (n - 2) * kappa - trace_x * trace_y / ((n - 1) * (n - 2))


def block_stacks(rows: Tensor, block: int) -> list[Tensor]:
    """Consecutive blocks of rows as stacks (blocks, b, p), without a copy; a remainder joins the last block.

    One stack of the whole blocks and, if there is a remainder, one of the last block alone.
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
    """X Xᵀ for a stack (blocks, b, p); a CPU leaves out most of what symmetry repeats."""
    blocks, b, width = stack.shape
    if stack.is_cuda:
        return _in_slices(stack)
    if b <= STRIP or width < 4 * b:
        return torch.bmm(stack, stack.transpose(1, 2))
    if blocks == 1 and width % SLICES == 0:  # one block would leave cores idle
        slices = stack.reshape(b, SLICES, width // SLICES).transpose(0, 1)
        return _mirrored(_upper(slices).sum(0, keepdim=True))
    return _mirrored(_upper(stack))


def _in_slices(stack: Tensor) -> Tensor:
    """Sum the products of slices of the features, since one long and thin product leaves a GPU idle."""
    _, b, width = stack.shape
    slices = slices_of(width)
    parts = [block.reshape(b, slices, width // slices).transpose(0, 1) for block in stack]
    return torch.stack([torch.bmm(part, part.transpose(1, 2)).sum(0) for part in parts])


def slices_of(width: int) -> int:
    """The number of slices into which a GPU splits this many features."""
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

NEAR = 1e-2  # of ‖x‖² + ‖y‖², below which ‖x − y‖² is computed from the difference; above, at most two digits are lost
MANY = 0.1  # share of near pairs from which all are computed from differences
AT_A_TIME = 2**18  # entries of differences


def distances(rows: Tensor) -> Tensor:
    """(n, n) Euclidean distances, with all digits where rows are close too."""
    return squared_distances(rows).sqrt_()


def squared_distances(rows: Tensor) -> Tensor:
    """(n, n), from inner products; from differences of rows that are close, where inner products would lose digits."""
    x = centred(rows)  # changes the rounding of distances, not distances
    lengths = row_squares(x)
    squares = self_product(x.T).mul_(-2).add_(lengths[:, None]).add_(lengths)  # in place, since these are large
    squares.fill_diagonal_(torch.inf)
    if bool(squares.amin() < 2 * NEAR * lengths.amax()):  # False for most data
        _take_differences(squares, rows, lengths)
    return squares.fill_diagonal_(0)


def _take_differences(squares: Tensor, rows: Tensor, lengths: Tensor) -> None:
    """Replace the squared distances of close rows, uncentred, since the mean may be far from all of them."""
    i, j = (squares < NEAR * (lengths[:, None] + lengths)).triu_(1).nonzero(as_tuple=True)
    if len(i) > MANY * len(rows) ** 2 / 2:
        i, j = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
        squares[i, j] = squares[j, i] = torch.pdist(rows).square_()
        return
    step = max(AT_A_TIME // rows.shape[1], 1)
    for a, b in zip(i.split(step), j.split(step), strict=True):
        squares[a, b] = squares[b, a] = row_squares(rows[a] - rows[b])


def upper_triangle(square: Tensor) -> Tensor:
    """(n (n − 1) / 2,): the entries above the diagonal of (n, n), row by row."""
    if for_numpy(square):
        from scipy.spatial.distance import squareform

        return torch.from_numpy(squareform(square.numpy(), checks=False))
    i, j = torch.triu_indices(len(square), len(square), 1, device=square.device)
    return square[i, j]


# Mean and variance of ⟨K, P L Pᵀ⟩ over all permutations P, for centred symmetric K and L, in closed form
#
# Kazi-Aoual, Hitier, Sabatier and Lebreton (1995), for the RV coefficient, which is linear CKA.


@dataclass(frozen=True)
class Invariants:
    """The sums that the moments depend on; shapes broadcast over pairs of sites."""

    trace: Tensor  # Σ Kᵢᵢ
    norm: Tensor  # Σ Kᵢⱼ²
    diagonal: Tensor  # Σ Kᵢᵢ²


def permuted_moments(k: Invariants, l: Invariants, n: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of ⟨K, P L Pᵀ⟩; needs at least 4 rows."""
    n = float(n)  # a product of five does not fit into an integer
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
    """The rows in float32 at least."""
    return rows if rows.dtype in FULL else rows.float()


def centred_rows(rows: Tensor) -> Tensor:
    """Rows (…, n, p) less their mean, in float32 at least.

    The first row is subtracted first, so that a large offset costs no digits and equal rows become exactly 0.
    """
    rows = widened(rows)
    rows = rows - rows[..., :1, :].detach()  # a constant, which the mean removes from the gradient too
    return rows - rows.mean(-2, keepdim=True)


def centred_grams(rows: Tensor) -> Tensor:
    """(…, n, n): X Xᵀ of centred rows (…, n, p)."""
    return grams(centred_rows(rows))


def grams(rows: Tensor) -> Tensor:
    """(…, n, n): X Xᵀ of rows (…, n, p); a GPU splits the features into slices."""
    if not rows.is_cuda or (slices := slices_of(rows.shape[-1])) == 1:
        return rows @ rows.mT
    parts = rows.unflatten(-1, (slices, -1)).transpose(-2, -3)
    return (parts @ parts.mT).sum(-3)


def live_gram(rows: Tensor, *, centre: bool = True) -> Tensor:
    """(n, n): X Xᵀ of rows (n, p), centred or not, in float32 at least, without a copy of the rows."""
    return SymmetricGradient.apply(sized_gram(rows, centre=centre)[0], centre)[0]


def sized_gram(rows: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """(1, n, n): X Xᵀ as in `live_gram`, before `SymmetricGradient`, and n‖first row‖² (1,), or that of the mean.

    Compiled code gets plain operations: traced functions would not notice rows that are overwritten later.
    """
    if not torch.compiler.is_compiling():
        return _Gram.apply(rows, centre)
    gram = centred_grams(rows) if centre else grams(widened(rows.clone()))
    return gram[None], len(rows) * squared_sizes(rows[:1])


class _Gram(torch.autograd.Function):
    """X Xᵀ of one set of rows. Its gradient must be symmetric, and centred if the rows are."""

    @staticmethod
    def forward(rows: Tensor, centre: bool) -> tuple[Tensor, Tensor]:
        if gram_cuda.suits(rows[None]):
            gram, size = gram_cuda.gram_blocks(rows[None], about="mean" if centre else "nothing", tf32=False)
        else:
            parts = (centred_rows(part) if centre else widened(part) for part in _strips(rows))
            gram = reduce(torch.add, (gram_stack(part.contiguous()[None]) for part in parts))
            size = len(rows) * squared_sizes(rows[:1])
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
        # A gradient of bfloat16 rows is made in bfloat16, which has the exponents of float32.
        digits = rows.dtype if rows.dtype in (*FULL, torch.bfloat16) else torch.float32
        pull = gradients[0][0].to(digits)
        strips = []
        for part in _strips(rows):
            part = part.to(digits) - part[:1] if ctx.centre else part.to(digits)
            strips.append(torch.addmm(part[:1], pull, part, beta=0, alpha=2).to(rows.dtype))
        return strips[0] if len(strips) == 1 else torch.cat(strips, dim=1), None


def _strips(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, WIDENED // len(rows)), dim=1)


def squared_sizes(rows: Tensor) -> Tensor:
    """‖row‖² (n,) in float64, without gradients."""
    return torch.linalg.vector_norm(rows.detach(), dim=1, dtype=torch.float64).square()


class SymmetricGradient(torch.autograd.Function):
    """Gram matrices (…, n, n), unchanged, whose gradient is made symmetric, and centred if they are."""

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
