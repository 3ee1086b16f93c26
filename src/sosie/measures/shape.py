"""Measures from the best rotation of one set of rows onto the other, and from linear regression."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import inverse_root, nuclear_norm, product
from ..stats import Covariances, Scatter
from .define import define


def _overlap(c: Covariances) -> Tensor:
    return c.nuclear / (c.x.trace.sqrt() * c.y.trace.sqrt())


@define(
    reads=Covariances,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    paper="tang2020",
    cost="n p q + p q min(p, q)",
    few_rows="biased",
    chance="grows with √(p q) / n",
)
def normalized_bures(c: Covariances) -> Tensor:
    """Normalised Bures similarity: fidelity of the centred Gram matrices over the root of their traces.

    For linear kernels that is ‖XᵀY‖₊ / (‖X‖ ‖Y‖), the cosine after the best rotation.
    """
    return _overlap(c)


@define(
    reads=Covariances,
    bounds=(0, 2**0.5),
    same=0,
    closer="down",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    paper="schonemann1966, williams2021",
    cost="n p q + p q min(p, q)",
    precise=True,  # a distance is the root of a small difference
    few_rows="biased",
    chance="below √2, towards 0 as p grows past n",
)
def procrustes_distance(c: Covariances) -> Tensor:
    """Distance after centring, scaling each side to unit norm, and the best rotation: √(2 − 2 ‖XᵀY‖₊).

    The distance itself, not its square, which other code often prints under the same name.
    """
    return distance_from(_overlap(c))


@define(
    reads=Covariances,
    bounds=(0, torch.pi / 2),
    same=0,
    closer="down",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    paper="williams2021",
    cost="n p q + p q min(p, q)",
    precise=True,
    few_rows="biased",
    chance="below π/2, towards 0 as p grows past n",
)
def procrustes_angle(c: Covariances) -> Tensor:
    """Angle between the two sets of rows after the best rotation: arccos of normalized_bures; a metric."""
    return _angle_from(_overlap(c))


@define(
    reads=Covariances,
    bounds=(0, None),
    same=0,
    closer="down",
    invariant={"rotation", "shift"},
    symmetric=True,
    paper="schonemann1966",
    cost="n p q + p q min(p, q)",
    precise=True,
    few_rows="biased",
    chance="below √(‖X‖² + ‖Y‖²)",
)
def raw_procrustes_distance(c: Covariances) -> Tensor:
    """Distance after centring and the best rotation, sizes as they are: √(‖X‖² + ‖Y‖² − 2 ‖XᵀY‖₊).

    Summed over the rows, not averaged: it grows with √n and with the scale of the activations.
    """
    return distance_between(c.x.n * c.x.trace, c.y.n * c.y.trace, c.x.n * c.nuclear)


@define(
    reads=Covariances,
    bounds=(0, torch.pi / 2),
    same=0,
    closer="down",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    paper="williams2021",
    cost="n p q + p³ + q³",
    precise=True,
    few_rows="biased",
    chance="below π/2, towards 0 as p grows past n",
)
def shape_angle(c: Covariances, alpha: float = 0.5) -> Tensor:
    """Angle after the best rotation of partly whitened rows, X (αI + (1 − α) C^(-1/2)): from CCA (0) to Procrustes (1).

    C is the covariance of X scaled so that its eigenvalues, as many as its rank, are 1 on average; without that (as
    in the authors' netrep) a value between would depend on the units. alpha=1 is procrustes_angle; alpha=0 is the
    arccos of Σρ / √(rank x · rank y), with ρ the canonical correlations: for equal ranks, of mean_cca. Directions
    with less than 1e-10 of the largest variance (1e-24 where all rows are in memory and carry float64's digits) are no
    part of C^(-1/2).
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"shape_angle goes from CCA (alpha=0) to Procrustes (alpha=1), got alpha={alpha!r}")
    if alpha < 1 and (components := c.principal(1.0)) is not None:
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
    same=1,
    closer="up",
    invariant={"scale", "shift", "rotation"},
    symmetric=False,
    precise=True,
    paper="kornblith2019",
    cost="(n + p) p (p + q)",
    few_rows="saturates in x",
    chance="p / (n − 1)",
)
def regression_r2(c: Covariances) -> Tensor:
    """Share of y's variance that a linear regression on x explains, in sample.

    Any invertible map of x leaves it as it is; of y only rotations do. 1 when x has at least as many
    neurons as there are rows.
    """
    return c.x_whitened.square().sum() / c.y.trace
