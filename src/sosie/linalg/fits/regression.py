"""Least squares and its relatives: ridge and reduced rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dense import eigenvalues, singular
from ..spectra import Spectrum, loss_of
from .define import check_count, check_number, define
from .joint import Affine, JointMoments, finished


@dataclass(frozen=True)
class _Solution:
    """Least squares from one factorisation."""

    weight: Tensor  # (q, p)
    fitted: Tensor  # (rank, q): its Gram matrix is the second moment of the fitted values
    live: Tensor  # (q, p): where both neurons vary; elsewhere a weight is rounding, and exactly none
    rank: int
    condition: float
    dropped: int  # directions that A has, but that its moments do not carry

    @property
    def facts(self) -> dict[str, float]:
        return {"rank": self.rank, "condition": self.condition, "dropped": self.dropped}


def _solve(m: JointMoments, intercept: bool, tolerance: float | None) -> _Solution:
    """Columns are scaled to unit size first, so that a quiet neuron counts like a loud one."""
    tolerance = m.tolerance if tolerance is None else check_number("tolerance", tolerance)
    aa, bb, ab = m.about("mean" if intercept else "zero")
    live_a, live_b = (m.varies_a, m.varies_b) if intercept else (aa.diagonal() > 0, bb.diagonal() > 0)
    size = aa.diagonal()[live_a].sqrt()
    correlations = aa[live_a][:, live_a] / (size[:, None] * size[None, :])
    spectrum = Spectrum.of(correlations, tolerance)
    whitening = spectrum.whitening / size[:, None]
    fitted = whitening.T @ ab[live_a]
    solution = whitening @ fitted
    if spectrum.rank < len(size):
        # Of all solutions the shortest, in A's own units: no part of it where A never goes.
        basis = torch.linalg.qr(size[:, None] * spectrum.vectors).Q
        solution = basis @ (basis.T @ solution)
    weight = torch.zeros_like(ab)
    weight[live_a] = solution
    live = live_b[:, None] & live_a
    condition, dropped = float(spectrum.values[0] / spectrum.values[-1]), 0
    if spectrum.rank < len(size):
        sizes = eigenvalues(correlations).clamp_min(0).sqrt()  # below 0 by rounding
        dropped = loss_of(sizes, tolerance**0.5, min(m.rounding, tolerance**0.5)).count
    return _Solution(weight.T * live, fitted, live, spectrum.rank, condition, dropped)


@define
def least_squares(m: JointMoments, intercept: bool = True, tolerance: float | None = None) -> Affine:
    """The map with the smallest squared error; of several, the shortest.

    Neurons are scaled to unit variance (without intercept: unit mean square); directions with less than `tolerance`
    of the largest eigenvalue of what results, A's correlations, count as none: 1e-10, or 1e-6 where the moments are of
    float32 products. `condition` is that of these correlations, and `dropped` counts directions that were cut although
    they are above rounding. Where A is rank-deficient, the length is that of the weights alone; a pseudoinverse with a
    column of ones, as in the code of Csiszárik et al. 2021, counts the bias too.
    """
    found = _solve(m, intercept, tolerance)
    return finished(m, found.weight, intercept=intercept, **found.facts)


@define
def reduced_rank(
    m: JointMoments, k: int, truncate: bool = False, intercept: bool = True, tolerance: float | None = None
) -> Affine:
    """The map of rank k with the smallest squared error: reduced-rank regression (Izenman 1975).

    Least squares, projected on the k directions in which its *fitted values* are largest: M V Vᵀ from the singular
    vectors V of A M. That is also §4.2 of Csiszárik et al. 2021, and the "SVD in the activation space" of their §7;
    their code takes neither intercept nor centring there (intercept=False). `truncate=True` keeps instead the k
    largest singular values of the weights themselves, as compression of weight matrices does: it looks at no
    activations, depends on A's units and is never the better fit.
    """
    k = check_count("k", k, min(m.widths))
    found = _solve(m, intercept, tolerance)
    if truncate:
        left, sizes, right = singular(found.weight)
        weight = (left[:, :k] * sizes[:k]) @ right[:k]
    else:
        leading = singular(found.fitted)[2][:k]
        weight = leading.T @ (leading @ found.weight)
    return finished(m, weight * found.live, intercept=intercept, **{**found.facts, "rank": min(k, found.rank)})


@define
def ridge(m: JointMoments, strength: float) -> Affine:
    """The smallest ‖S(A) − B‖² / n + λ ‖weight‖², with λ = strength × the mean variance of A's neurons.

    The bias is not penalised. So `strength` has no units and means the same for any n; scikit-learn's alpha is n λ.
    """
    strength = check_number("strength", strength)
    penalty = strength * m.cov_aa.diagonal().mean()
    system = m.cov_aa + penalty * torch.eye(len(m.cov_aa), dtype=penalty.dtype, device=penalty.device)
    weight = torch.cholesky_solve(m.cov_ab, torch.linalg.cholesky(system)).T
    weight = weight * (m.varies_b[:, None] & m.varies_a)  # elsewhere a covariance is rounding
    values = eigenvalues(system)
    return finished(
        m, weight, rank=int(m.varies_a.sum()), condition=float(values[-1] / values[0]), penalty=float(penalty)
    )
