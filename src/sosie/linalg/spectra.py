"""Spectra of symmetric matrices, with a stated tolerance for what counts as zero."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

RANK_TOLERANCE = 1e-10  # eigenvalues below this share of the largest are zero (float64 products of rows)
RANK_TOLERANCE_FLOAT32 = 1e-5  # the same for matrices made from float32 products


def rank_tolerance(dtype: torch.dtype) -> float:
    """Which share of the largest eigenvalue is rounding, for a matrix of this precision."""
    return RANK_TOLERANCE if dtype == torch.float64 else RANK_TOLERANCE_FLOAT32


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues (descending) and eigenvectors of a covariance, cut at the tolerance."""

    values: Tensor  # (rank,)
    vectors: Tensor  # (p, rank)

    @classmethod
    def of(cls, matrix: Tensor, tolerance: float | None = None) -> Spectrum:
        if tolerance is None:
            tolerance = rank_tolerance(matrix.dtype)
        values, vectors = torch.linalg.eigh(matrix)
        kept = values > tolerance * values[-1]
        if not bool(values[-1] > 0):
            kept = torch.zeros_like(kept)
        return cls(values[kept].flip(0), vectors[:, kept].flip(1))

    @property
    def rank(self) -> int:
        return len(self.values)

    def leading(self, share: float) -> Spectrum:
        """The fewest leading directions that hold this share of the variance."""
        cumulative = self.values.cumsum(0) / self.values.sum()
        count = int((cumulative < share - 1e-12).sum()) + 1
        return Spectrum(self.values[:count], self.vectors[:, :count])

    def cut_after(self, count: int) -> float:
        """A tolerance that `inverse_root` keeps just so many directions with."""
        following = self.values[count] if count < self.rank else 0.0
        return float((self.values[count - 1] + following) / 2 / self.values[0])

    @cached_property
    def whitening(self) -> Tensor:
        """(p, rank): turns rows into uncorrelated columns of unit variance."""
        return self.vectors * self.values.rsqrt()


class _InverseRoot(torch.autograd.Function):
    """C^(-1/2) on the range of C, with a gradient that survives equal eigenvalues.

    The derivative of a spectral function needs (f(a) − f(b)) / (a − b) for each pair of eigenvalues
    (Daleckii and Krein); for f = x^(-1/2) that is −1 / (√a √b (√a + √b)), which never divides by a − b.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, tolerance: float) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
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
        found = vectors @ (weight * inner) @ vectors.T
        return (found + found.T) / 2, None


def inverse_root(matrix: Tensor, tolerance: float | None = None) -> Tensor:
    """The symmetric inverse square root on the range of a covariance; differentiable."""
    if tolerance is None:
        tolerance = rank_tolerance(matrix.dtype)
    return _InverseRoot.apply(matrix, tolerance)


def nuclear_norm(matrix: Tensor) -> Tensor:
    """Sum of singular values; differentiable, at rank deficiency too (a subgradient)."""
    return torch.linalg.svdvals(matrix).sum(-1)
