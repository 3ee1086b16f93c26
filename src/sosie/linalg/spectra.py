"""Spectra of symmetric matrices, with a stated tolerance for what counts as zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .products import (
    eigen,
    eigenvalues,
    for_numpy,
    once,
    orthonormal,
    self_product,
    singular_values,
    threads_for,
    triangular_inverse,
)

RANK_TOLERANCE = 1e-10  # eigenvalues below this share of the largest are zero (float64 products of rows)
RANK_TOLERANCE_FLOAT32 = 1e-5  # the same for matrices made from float32 products
RANK_TOLERANCE_FLOAT32_PRODUCTS = 1e-6  # the same if products were centred and summed in float64

SMALLEST_DIRECTION = 1e-12  # singular values of float64 rows below this share of the largest are zero
SMALLEST_DIRECTION_FLOAT32 = 1e-5  # the same for rows of float32 numbers: the rounding of a network is well below
ENOUGH_VARIANCE = 1e-8  # share of the largest eigenvalue below which a covariance has fewer than eight digits

CLOSE = 0.99  # of the most a nuclear norm can be, above which distances are roots of small differences
ENOUGH_DIGITS = 1e-10  # bound on the relative error of a nuclear norm from eigenvalues; usually it is a hundredth
ENOUGH_DIGITS_FLOAT32 = 1e-7  # the same if rows were rounded to float32
EIGENVALUE_ROUNDING = 2  # times ε ‖λ‖ √(Σ 1/λ) bounds the error of Σ √λ; at most 1.3 was measured
WORTH_SQUARING = 64  # columns
FEW = 4  # one column in so many is tried first
LIKELY = 0.02  # times the error that is enough is required of these columns, since all columns have smaller eigenvalues


def rank_tolerance(dtype: torch.dtype) -> float:
    """The share of the largest eigenvalue that is rounding in a matrix of this precision."""
    return RANK_TOLERANCE if dtype == torch.float64 else RANK_TOLERANCE_FLOAT32


@dataclass(frozen=True)
class Loss:
    """Directions of the data that are dropped."""

    count: int
    of: int
    condition: float  # the largest over the smallest of them, as standard deviations


@dataclass(frozen=True)
class Span:
    """Orthonormal columns that span what centred rows (n, p) span, down to a tolerance."""

    basis: Tensor  # (n, rank)
    sizes: Tensor  # (rank,) singular values, descending
    loss: Loss

    @classmethod
    def of(cls, rows: Tensor, tolerance: float, rounding: float, present: int = 0) -> Span:
        """`tolerance` and `rounding` are shares of the largest singular value; data have no direction below `rounding`.

        `present` is the number of directions that they are known to have, however small.
        """
        basis, sizes = orthonormal(rows)
        kept = sizes > tolerance * sizes[0]
        return cls(basis[:, kept], sizes[kept], loss_of(sizes, tolerance, rounding, present))

    @property
    def condition(self) -> float:
        return float(self.sizes[0] / self.sizes[-1])


def loss_of(sizes: Tensor, tolerance: float, rounding: float, present: int = 0) -> Loss:
    """The loss from cutting singular values at the tolerance; see `Span.of`."""
    share = (sizes / sizes.max()).sort(descending=True).values
    of_data = share[: max(int((share > rounding).sum()), present)]
    lost = of_data[of_data <= tolerance]
    least = torch.finfo(share.dtype).eps  # smaller values are rounding, which bounds the condition
    return Loss(len(lost), len(of_data), float(1 / lost.min().clamp_min(least)) if len(lost) else 1.0)


def leading_count(values: Tensor, share: float) -> int:
    """The fewest of the variances, descending, that hold this share of their sum."""
    cumulative = values.cumsum(0) / values.sum()
    return min(int((cumulative < share - 1e-12).sum()) + 1, len(values))


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues (descending) and eigenvectors of a covariance, cut at the tolerance."""

    values: Tensor  # (rank,)
    vectors: Tensor  # (p, rank)

    @classmethod
    def of(cls, matrix: Tensor, tolerance: float | None = None) -> Spectrum:
        if tolerance is None:
            tolerance = rank_tolerance(matrix.dtype)
        values, vectors = eigen(matrix)
        kept = torch.zeros_like(values, dtype=torch.bool)
        if len(values) and bool(values[-1] > 0):
            kept = values > tolerance * values[-1]
        return cls(values[kept].flip(0), vectors[:, kept].flip(1))

    @property
    def rank(self) -> int:
        return len(self.values)

    def leading(self, share: float) -> Spectrum:
        """The fewest leading directions that hold this share of the variance."""
        count = leading_count(self.values, share)
        return Spectrum(self.values[:count], self.vectors[:, :count])

    def cut_after(self, count: int) -> float:
        """A tolerance with which `inverse_root` keeps this many directions."""
        following = self.values[count] if count < self.rank else 0.0
        return float((self.values[count - 1] + following) / 2 / self.values[0])

    @once
    def whitening(self) -> Tensor:
        """(p, rank): turns rows into uncorrelated columns of unit variance."""
        return self.vectors * self.values.rsqrt()


class _InverseRoot(torch.autograd.Function):
    """C^(-1/2) on the range of C, with a gradient that is finite for equal eigenvalues.

    The derivative of a spectral function needs (f(a) − f(b)) / (a − b) for each pair of eigenvalues (Daleckii and
    Krein); for f = x^(-1/2) that is −1 / (√a √b (√a + √b)), without a division by a − b.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, tolerance: float) -> Tensor:
        values, vectors = eigen(matrix)
        kept = values > tolerance * values[-1]
        root = torch.where(kept, values.clamp_min(0).sqrt(), torch.zeros_like(values))
        inverse = torch.where(kept, 1 / root, torch.zeros_like(root))
        ctx.save_for_backward(vectors, values, root, inverse, kept)
        return (vectors * inverse) @ vectors.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        vectors, values, root, inverse, kept = ctx.saved_tensors
        both = kept[:, None] & kept[None, :]
        one = kept[:, None] ^ kept[None, :]
        sums = torch.where(both, root[:, None] + root[None, :], torch.ones_like(values))
        within = -inverse[:, None] * inverse[None, :] / sums
        gap = torch.where(one, values[:, None] - values[None, :], torch.ones_like(values))
        across = (inverse[:, None] - inverse[None, :]) / gap
        weight = torch.where(both, within, torch.where(one, across, torch.zeros_like(within)))
        inner = vectors.T @ gradients[0] @ vectors
        gradient = vectors @ (weight * inner) @ vectors.T
        return (gradient + gradient.T) / 2, None


def inverse_root(matrix: Tensor, tolerance: float | None = None) -> Tensor:
    """The symmetric inverse square root on the range of a covariance; differentiable."""
    if tolerance is None:
        tolerance = rank_tolerance(matrix.dtype)
    return _InverseRoot.apply(matrix, tolerance)


def whitening(matrix: Tensor, tolerance: float | None = None) -> tuple[Tensor, bool]:
    """W with W C Wᵀ = 1 on the range of a covariance C, and whether that is the whole space; differentiable.

    The inverse of the Cholesky factor if C is far from singular, which takes a fraction of the time of the inverse
    square root and differs from it by a rotation; otherwise the inverse square root.
    """
    tolerance = rank_tolerance(matrix.dtype) if tolerance is None else tolerance
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed):
        inverse = triangular_inverse(factor)
        # The smallest eigenvalue is at least 1 / ‖L⁻¹‖², and the largest at most the trace.
        if bool(inverse.detach().square().sum() * tolerance * matrix.detach().trace() < 1):
            return inverse, True
    return inverse_root(matrix, tolerance), False


def nuclear_norm(matrix: Tensor, most: Tensor | float | None = None, enough: float = ENOUGH_DIGITS) -> Tensor:
    """The sum of singular values; differentiable, with a subgradient at rank deficiency.

    `most` bounds the sum. Well below it a relative error of `enough` is allowed, and close to it such an error of the
    difference: eigenvalues that are good enough take a third of the time.
    """
    if most is not None and _worth_squaring(matrix, enough):
        norm, error = _from_eigenvalues(matrix)
        scale = norm if bool(norm < CLOSE * most) else most - norm
        if bool(error < enough * scale):
            return norm
    return singular_values(matrix).sum(-1)


def _worth_squaring(matrix: Tensor, enough: float) -> bool:
    """Return whether eigenvalues are likely to give a nuclear norm enough digits, judging by some columns."""
    if min(matrix.shape) < WORTH_SQUARING or not for_numpy(matrix) or matrix.dtype != torch.float64:
        return False
    norm, error = _from_eigenvalues(matrix[:, ::FEW])
    return bool(error < LIKELY * enough * norm)


def _from_eigenvalues(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of singular values from the eigenvalues λ of MᵀM, and a bound on its error, infinite unless all λ > 0.

    Rounding moves the eigenvalues by some d with ‖d‖ ∝ ε ‖MᵀM‖, and Σ √λ by Σ d / (2 √λ), which is at most
    ½ ‖d‖ √(Σ 1/λ) (Cauchy and Schwarz).
    """
    with threads_for(matrix):
        squared = self_product(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T)
    values = eigenvalues(squared)
    if not bool(values[0] > 0):
        return values.sum(), values.new_tensor(torch.inf)
    rounding = EIGENVALUE_ROUNDING * torch.finfo(values.dtype).eps
    return values.sqrt().sum(), rounding * values.norm() * values.reciprocal().sum().sqrt()
