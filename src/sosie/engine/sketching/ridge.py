"""Ridge regression with its penalty by leaving out one row at a time, in closed form.

`balanced`: whether rows, and targets, add up to 0, since their means came off them. A row left out is then minus the
sum of the others, and would be known exactly where nothing is penalised: the means must be taken anew without it,
which is what a constant among the columns does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...linalg import eigen, self_product

GRID = tuple(10 ** (half / 2) for half in range(-12, 9))  # penalties tried, in units of the mean eigenvalue


@dataclass(frozen=True)
class Penalty:
    """The penalty α of a ridge regression, and what it was chosen by."""

    alpha: float
    relative: float  # to the mean eigenvalue of the kernel
    error: float  # squared error at rows left out, over that of answering with the mean
    tried: tuple[tuple[float, float], ...]  # every α on the grid and its error; none where α was given

    @property
    def at_edge(self) -> bool:
        """Whether the best of the grid is its first or last, so that the true best may lie beyond."""
        return bool(self.tried) and self.alpha in (self.tried[0][0], self.tried[-1][0])


def ridge_of_rows(rows: Tensor, targets: Tensor, alpha: float | None, *, balanced: bool) -> tuple[Tensor, Penalty]:
    """W (k, C) = Ψᵀ(ΨΨᵀ + αI)⁻¹T for rows Ψ (M, k) and targets T (M, C), by way of the smaller of M and k."""
    if len(rows) < rows.shape[1]:
        duals, penalty = ridge_of_gram(self_product(rows.T), targets, alpha, balanced=balanced)
        return rows.T @ duals, penalty
    spectrum, vectors = _positive(self_product(rows))
    turned = rows @ vectors  # ΨV, with ΨᵀΨ = VΛVᵀ
    along = turned.T @ targets

    def left_out(penalty: float) -> Tensor:
        shrunk = 1 / (spectrum + penalty)
        leverage = turned.square() @ shrunk + (1 / len(rows) if balanced else 0)
        return (targets - turned @ (along * shrunk[:, None])) / (1 - leverage)[:, None]

    penalty = _chosen(left_out, spectrum, targets, alpha)
    return vectors @ (along / (spectrum + penalty.alpha)[:, None]), penalty


def ridge_of_gram(gram: Tensor, targets: Tensor, alpha: float | None, *, balanced: bool) -> tuple[Tensor, Penalty]:
    """(K + αI)⁻¹T for a kernel K (M, M) and targets T (M, C)."""
    if balanced:
        # The direction of ones, which K and T have nothing of, is made the largest and left out.
        spectrum, vectors = (part[..., :-1] for part in _positive(gram + 2 * gram.trace() / len(gram)))
    else:
        spectrum, vectors = _positive(gram)
    along = vectors.T @ targets
    squares = vectors.square()

    def left_out(penalty: float) -> Tensor:
        shrunk = 1 / (spectrum + penalty)
        return (vectors @ (along * shrunk[:, None])) / (squares @ shrunk)[:, None]

    penalty = _chosen(left_out, spectrum, targets, alpha)
    return vectors @ (along / (spectrum + penalty.alpha)[:, None]), penalty


def _positive(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a matrix without negative ones: what is below 0 is rounding."""
    values, vectors = eigen(gram)
    return torch.where(values > 0, values, torch.zeros_like(values)), vectors


def _chosen(left_out: Callable[[float], Tensor], spectrum: Tensor, targets: Tensor, alpha: float | None) -> Penalty:
    """The α that was given, or the one of the grid that answers best for rows left out."""
    mean = float(spectrum.sum()) / len(targets)
    variance = float(targets.square().sum())

    def error(penalty: float) -> float:
        return float(left_out(penalty).square().sum()) / variance

    if alpha is not None:
        rounding = torch.finfo(spectrum.dtype).eps * len(spectrum) * float(spectrum.amax())
        if alpha < rounding:
            raise ValueError(
                f"alpha={alpha:g} is lost in the rounding of a kernel whose largest eigenvalue is "
                f"{float(spectrum.amax()):.3g}: take at least {rounding:.1g}, or None to have it chosen"
            )
        return Penalty(alpha, alpha / mean, error(alpha), ())
    tried = tuple((share * mean, error(share * mean)) for share in GRID)
    best, least = min(tried, key=lambda pair: pair[1])
    return Penalty(best, best / mean, least, tried)
