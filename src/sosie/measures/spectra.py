"""Measures from what rows span, what ridge regressions on them predict, and their covariances."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import centred, cholesky, nuclear_norm, product, total_squares, triangular_inverse
from ..stats import Covariances, PairedRows, Scatter
from .define import define
from .shape import distance_between

SMALLEST_RIDGE = 1e-8  # share of the total variance below which rounding decides


@define(
    reads=Covariances,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"linear", "shift"},
    symmetric=True,
    precise=True,
    paper="may2019",
    cost="(n + p + q) p q",
    few_rows="saturates",
    chance="min(p, q) / (n − 1)",
)
def eigenspace_overlap(c: Covariances) -> Tensor:
    """Overlap of the spaces that the neurons span: ‖UᵀV‖² over the larger rank, U and V their orthonormal bases.

    Of centred rows (May et al. take them as they are). cca_r2 divides the same by the smaller rank.
    """
    return c.whitened.square().sum() / torch.maximum(c.x.rank, c.y.rank)


@define(
    reads=Covariances,
    bounds=(0, None),
    same=0,
    closer="down",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    precise=True,
    paper="boixadsera2022",
    cost="n p q + p³ + q³",
    few_rows="biased",
    chance="below √(‖Ax‖² + ‖Ay‖²) with A = (C + lam)⁻¹ C, towards 0 as p grows past n",
)
def gulp(c: Covariances, lam: float = 0.01) -> Tensor:
    """GULP distance: how much predictions of ridge regressions on x and on y differ, over all targets.

    √(‖Ax‖² + ‖Ay‖² − 2 tr((Cx + λ)⁻¹ Cxy (Cy + λ)⁻¹ Cyx)) with A = (C + λ)⁻¹ C: the root of the mean squared
    difference of predictions, summed over an orthonormal basis of targets. Rows are centred and each side scaled to a
    total variance of 1, so that λ is a share of it. Small λ compares like cca_r2, large λ (times the value) like
    the distance of Gram matrices whose cosine is linear_cka.
    """
    if not lam >= SMALLEST_RIDGE:
        raise ValueError(f"gulp needs a penalty lam of at least {SMALLEST_RIDGE:g} (of a variance of 1), got {lam!r}")
    (x, length_x), (y, length_y) = (side.memo(("ridge", lam), lambda s: _ridge(s, lam)) for side in (c.x, c.y))
    between = total_squares(product(product(x, c.xy / (c.x.trace.sqrt() * c.y.trace.sqrt())), y.T))
    # Inverting C + λ makes rounding larger by 1/λ.
    return distance_between(length_x, length_y, between, rounding=10 * torch.finfo(between.dtype).eps / lam)


def _ridge(scatter: Scatter, lam: float) -> tuple[Tensor, Tensor]:
    """The inverse L⁻¹ of the Cholesky factor of C + λ for a total variance of 1, and ‖(C + λ)⁻¹ C‖²."""
    matrix = scatter.matrix / scatter.trace
    factor = cholesky(matrix + lam * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))
    inverse = triangular_inverse(factor)
    return inverse, total_squares(product(product(inverse, matrix), inverse.T))


@define(
    reads=PairedRows,
    bounds=(0, None),
    same=0,
    closer="down",
    invariant={"shift"},
    symmetric=True,
    precise=True,
    paper="bures1969, bhatia2019",
    cost="(n + p) p² or n² p",
    few_rows="biased",
    chance="0 for equal covariances: the rows need not be paired",
    paired=False,
    same_width=True,
)
def bures_distance(rows: PairedRows) -> Tensor:
    """Bures (Wasserstein) distance of the two covariances, neuron by neuron: needs equal widths, but no pairing.

    √(tr Cx + tr Cy − 2 tr (Cx^½ Cy Cx^½)^½), where the last trace is ‖X Yᵀ‖₊ / n for centred rows. Depends on the
    scale and on the order of the neurons: for one network at two times, or on two sets of inputs.
    """
    x, y = (side.memo("covariance factor", _factor) for side in (rows.x, rows.y))
    length_x, length_y = x.square().sum(), y.square().sum()
    return distance_between(length_x, length_y, nuclear_norm(x @ y.T, most=(length_x + length_y) / 2))


def _factor(rows: Tensor) -> Tensor:
    """F with Fᵀ F the covariance: the centred rows over √n, or fewer rows that give the same."""
    n, width = rows.shape
    rows = centred(rows.double()) / n**0.5
    # A gradient through the shorter factor breaks down where a neuron is dead.
    return rows if rows.requires_grad or width >= n else torch.linalg.qr(rows, mode="r").R


@define(
    reads=Covariances,
    bounds=(0, 2**0.5),
    same=0,
    closer="down",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    differentiable=False,
    paper="bures1969, bhatia2019",
    cost="n p q + p³ + q³ or n² (p + q)",
    few_rows="biased",
    chance="0 for equal spectra: the rows need not be paired",
    paired=False,
)
def spectral_bures_distance(c: Covariances) -> Tensor:
    """Bures distance of the two covariances, of total variance 1 each, once one is rotated as near as it gets.

    √(2 − 2 Σ √(λᵢ μᵢ)) over the sorted eigenvalues, as shares of their sum. Compares how many directions share the
    variance and nothing else: neither rows nor neurons need to correspond, and the widths may differ.
    """
    x, y = (side.memo("root spectrum", _root_spectrum) for side in (c.x, c.y))
    short = min(len(x), len(y))
    one = x.new_ones(())
    return distance_between(one, one, (x[:short] * y[:short]).sum())


def _root_spectrum(scatter: Scatter) -> Tensor:
    """√(λ / Σλ), the largest first."""
    values = scatter.spectrum.values
    return (values / values.sum()).sqrt()
