"""Measures from the best rotation of one set of rows onto the other, from regression and from covariances."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..linalg.grams import centred
from ..linalg.products import cholesky, product, total_squares, triangular_inverse
from ..linalg.spectra import inverse_root, nuclear_norm
from ..stats import Covariances, PairedRows, Scatter
from .define import define
from .transforms import REGRESSION, ROTATION, SHAPE

SMALLEST_RIDGE = 1e-8  # share of the total variance below which rounding decides

# Facts that distances share, unless a measure declares otherwise. A distance is the root of a small difference, so it
# is `precise`.
distance_of_covariances = functools.partial(
    define, reads=Covariances, closer="down", invariant={"rotation", "scale", "shift"}, precise=True, few_rows="biased"
)


def _overlap(c: Covariances) -> Tensor:
    return c.nuclear / (c.x.trace.sqrt() * c.y.trace.sqrt())


@define(
    reads=Covariances,
    bounds=(0, 1),
    closer="up",
    invariant={"rotation", "scale", "shift"},
    paper="tang2020",
    cost="n p q + p q min(p, q)",
    few_rows="biased",
    chance="grows with √(p q) / n",
    aligned_by=ROTATION,
)
def normalized_bures(c: Covariances) -> Tensor:
    """Normalised Bures similarity: fidelity of the centred Gram matrices over the root of their traces.

    For linear kernels that is ‖XᵀY‖₊ / (‖X‖ ‖Y‖), the cosine after the best rotation.
    """
    return _overlap(c)


@distance_of_covariances(
    bounds=(0, 2**0.5),
    paper="schonemann1966, williams2021",
    cost="n p q + p q min(p, q)",
    chance="below √2, towards 0 as p grows past n",
    aligned_by=ROTATION,
)
def procrustes_distance(c: Covariances) -> Tensor:
    """Distance after centring, scaling each side to unit norm, and the best rotation: √(2 − 2 ‖XᵀY‖₊).

    The distance, not its square, which often has the same name elsewhere.
    """
    return distance_from(_overlap(c))


@distance_of_covariances(
    bounds=(0, torch.pi / 2),
    paper="williams2021",
    cost="n p q + p q min(p, q)",
    chance="below π/2, towards 0 as p grows past n",
    aligned_by=ROTATION,
)
def procrustes_angle(c: Covariances) -> Tensor:
    """Angle between the two sets of rows after the best rotation: arccos of normalized_bures; a metric."""
    return _angle_from(_overlap(c))


@distance_of_covariances(
    bounds=(0, torch.pi / 2),
    paper="williams2021",
    cost="n p q + n p² + n q²",
    chance="below π/2, towards 0 as p grows past n",
)
def cka_angle(c: Covariances) -> Tensor:
    """Angle between the centred Gram matrices: arccos of linear_cka; a metric, which some packages call CKA."""
    norms = [side.memo("squares", lambda s: total_squares(s.matrix).sqrt()) for side in (c.x, c.y)]
    return _angle_from(c.between / (norms[0] * norms[1]))


@define(
    reads=Covariances,
    bounds=(0, None),
    closer="up",
    same=None,
    invariant={"rotation", "shift"},
    all_pairs=True,
    paper="gretton2005",
    cost="n p q",
    few_rows="biased",
    chance="above 0, about tr Cx tr Cy / n",
)
def hsic(c: Covariances) -> Tensor:
    """Hilbert-Schmidt independence criterion of linear kernels, not normalised: tr(KHLH) / (n − 1)².

    The biased estimate, which linear_cka normalises: it grows with the square of each side's scale, so values of other
    layers cannot be compared.
    """
    return c.between * (c.x.n / (c.x.n - 1)) ** 2


@distance_of_covariances(
    bounds=(0, None),
    invariant={"rotation", "shift"},
    paper="schonemann1966",
    cost="n p q + p q min(p, q)",
    chance="below √(‖X‖² + ‖Y‖²)",
    aligned_by=ROTATION,
)
def raw_procrustes_distance(c: Covariances) -> Tensor:
    """Distance after centring and the best rotation, without scaling: √(‖X‖² + ‖Y‖² − 2 ‖XᵀY‖₊).

    Summed over the rows, not averaged: it grows with √n and with the scale of the activations.
    """
    return distance_between(c.x.n * c.x.trace, c.y.n * c.y.trace, c.x.n * c.nuclear)


@distance_of_covariances(
    bounds=(0, torch.pi / 2),
    paper="williams2021",
    cost="n p q + p³ + q³",
    chance="below π/2, towards 0 as p grows past n",
    aligned_by=SHAPE,
)
def shape_angle(c: Covariances, alpha: float = 0.5) -> Tensor:
    """Angle after the best rotation of partly whitened rows, X (αI + (1 − α) C^(-1/2)): from CCA (0) to Procrustes (1).

    C is the covariance of X, scaled so that its eigenvalues, as many as its rank, are 1 on average; without that (as in
    the authors' netrep) values in between would depend on the units. alpha=1 is procrustes_angle; alpha=0 is the arccos
    of Σρ / √(rank x · rank y), with ρ the canonical correlations: for equal ranks, of mean_cca. C^(-1/2) leaves out
    directions with less than 1e-10 of the largest variance (1e-24 if all rows are in memory in float64).
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"shape_angle goes from CCA (alpha=0) to Procrustes (alpha=1), got alpha={alpha!r}")
    if alpha == 1:
        return _angle_from(_overlap(c))
    if (components := c.principal(1.0)) is not None:
        shared, *sizes = components
        # In units in which variances are 1 on average, a component of standard deviation s becomes α s + 1 − α.
        x, y = (alpha * s / s.square().mean().sqrt() + 1 - alpha for s in sizes)
        most = x.norm() * y.norm()
        return _angle_from(nuclear_norm(x[:, None] * shared * y, most) / most)
    (x, size_x, inexact_x), (y, size_y, inexact_y) = (
        side.memo(("partly whitened", alpha), lambda s: _partly_whitened(s, alpha)) for side in (c.x, c.y)
    )
    most = size_x * size_y
    return _angle_from(nuclear_norm(product(product(x, c.xy), y), most) / most, max(inexact_x, inexact_y))


def _partly_whitened(scatter: Scatter, alpha: float) -> tuple[Tensor, Tensor, float]:
    """The map of one side's neurons, the norm of the rows that it gives, over √n, and the map's rounding."""
    spectrum, matrix = scatter.spectrum, scatter.matrix
    unit = (spectrum.rank / scatter.trace).sqrt()
    root = inverse_root(matrix) if matrix.requires_grad else product(spectrum.whitening, spectrum.vectors.T)
    mapped = alpha * unit * torch.eye(len(matrix)).to(matrix) + (1 - alpha) * root
    # Whitening makes rounding larger by the ratio of the largest to the smallest variance.
    rounding = (1 - alpha) * 10 * torch.finfo(matrix.dtype).eps * float(spectrum.values[0] / spectrum.values[-1])
    return mapped, (product(mapped, matrix) * mapped).sum().sqrt(), rounding


def distance_between(length_x: Tensor, length_y: Tensor, product: Tensor, rounding: float = 0) -> Tensor:
    """√(length_x + length_y − 2 product) of two squared lengths and an inner product, safe against rounding."""
    mean = (length_x + length_y) / 2
    return mean.sqrt() * distance_from(product / mean, rounding)


def distance_from(overlap: Tensor, rounding: float = 0) -> Tensor:
    """√(2 − 2 overlap), where an overlap that rounding put above 1 counts as 1; `rounding` if it is more than usual."""
    squared = 2 - 2 * overlap
    slack = max(rounding, 1e-12 if overlap.dtype == torch.float64 else 1e-6)
    nothing = (squared <= 0) & (squared >= -2 * slack)
    safe = torch.where(nothing, torch.ones_like(squared), squared)
    return torch.where(nothing, torch.zeros_like(squared), safe.sqrt())


def _angle_from(overlap: Tensor, rounding: float = 0) -> Tensor:
    # arccos loses half the digits near 1; the angle of a chord of length d does not.
    return 2 * torch.asin(distance_from(overlap, rounding) / 2)


@define(
    reads=Covariances,
    bounds=(0, 1),
    closer="up",
    invariant={"scale", "shift", "rotation"},
    symmetric=False,
    all_pairs=True,
    precise=True,
    paper="kornblith2019",
    cost="(n + p) p (p + q)",
    few_rows="saturates in x",
    chance="p / (n − 1)",
    aligned_by=REGRESSION,
)
def regression_r2(c: Covariances) -> Tensor:
    """Share of y's variance that a linear regression on x explains, in sample.

    Invariant to any invertible map of x, and to rotations of y. 1 if x has at least as many neurons as there are rows:
    predictivity is the value on rows that the regression was not fitted on.
    """
    return c.explained / c.y.trace


@define(
    reads=Covariances,
    bounds=(0, 1),
    closer="up",
    invariant={"linear", "shift"},
    all_pairs=True,
    precise=True,
    paper="may2019",
    cost="(n + p + q) p q",
    few_rows="saturates",
    chance="min(p, q) / (n − 1)",
)
def eigenspace_overlap(c: Covariances) -> Tensor:
    """Overlap of the spaces that the neurons span: ‖UᵀV‖² over the larger rank, with U and V orthonormal bases.

    Rows are centred, unlike in May et al. cca_r2 divides by the smaller rank instead.
    """
    return c.shared / torch.maximum(c.x.rank, c.y.rank)


@distance_of_covariances(
    bounds=(0, None),
    paper="boixadsera2022",
    cost="n p q + p³ + q³",
    chance="below √(‖Ax‖² + ‖Ay‖²) with A = (C + lam)⁻¹ C, towards 0 as p grows past n",
)
def gulp(c: Covariances, lam: float = 0.01) -> Tensor:
    """GULP distance: the difference between predictions of ridge regressions on x and on y, over all targets.

    √(‖Ax‖² + ‖Ay‖² − 2 tr((Cx + λ)⁻¹ Cxy (Cy + λ)⁻¹ Cyx)) with A = (C + λ)⁻¹ C: the root of the mean squared
    difference of predictions, summed over an orthonormal basis of targets. Rows are centred and each side scaled to a
    total variance of 1, so that λ is a share of it. Small λ compares like cca_r2, large λ (times the value) like
    the distance of Gram matrices whose cosine is linear_cka.
    """
    if not lam >= SMALLEST_RIDGE:
        raise ValueError(f"gulp needs a penalty lam of at least {SMALLEST_RIDGE:g} (of a variance of 1), got {lam!r}")
    (x, length_x), (y, length_y) = (side.memo(("ridge", lam), lambda s: _ridge(s, lam)) for side in (c.x, c.y))
    between = total_squares(product(product(x, c.xy / (c.x.trace.sqrt() * c.y.trace.sqrt())), y.T))
    # Inverting C + λ amplifies rounding by 1/λ.
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
    closer="down",
    invariant={"shift"},
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

    √(tr Cx + tr Cy − 2 tr (Cx^½ Cy Cx^½)^½), where the last trace is ‖X Yᵀ‖₊ / n for centred rows. Depends on the scale
    and the order of the neurons: for one network at two times, or on two sets of inputs.
    """
    x, y = (side.memo("covariance factor", _factor) for side in (rows.x, rows.y))
    length_x, length_y = x.square().sum(), y.square().sum()
    return distance_between(length_x, length_y, nuclear_norm(x @ y.T, most=(length_x + length_y) / 2))


def _factor(rows: Tensor) -> Tensor:
    """F with Fᵀ F the covariance: the centred rows over √n, or fewer rows with the same covariance."""
    n, width = rows.shape
    rows = centred(rows.double()) / n**0.5
    # A gradient through the shorter factor is not finite where a neuron is dead.
    return rows if rows.requires_grad or width >= n else torch.linalg.qr(rows, mode="r").R


@define(
    reads=Covariances,
    bounds=(0, 2**0.5),
    closer="down",
    invariant={"rotation", "scale", "shift"},
    differentiable=False,
    paper="bures1969, bhatia2019",
    cost="n p q + p³ + q³ or n² (p + q)",
    few_rows="biased",
    chance="0 for equal spectra: the rows need not be paired",
    paired=False,
)
def spectral_bures_distance(c: Covariances) -> Tensor:
    """Bures distance of the two covariances, of total variance 1 each, after the best rotation.

    √(2 − 2 Σ √(λᵢ μᵢ)) over the sorted eigenvalues, as shares of their sum. Compares only how the variance is spread
    over directions: neither rows nor neurons need to correspond, and the widths may differ.
    """
    x, y = (side.memo("root spectrum", _root_spectrum) for side in (c.x, c.y))
    short = min(len(x), len(y))
    one = x.new_ones(())
    return distance_between(one, one, (x[:short] * y[:short]).sum())


def _root_spectrum(scatter: Scatter) -> Tensor:
    """√(λ / Σλ), descending."""
    values = scatter.spectrum.values
    return (values / values.sum()).sqrt()
