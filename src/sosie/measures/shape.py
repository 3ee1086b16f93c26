"""Measures from the best rotation of one set of rows onto the other, and from linear regression."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stats import Covariances
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
    return _distance_from(_overlap(c))


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
    # arccos loses half the digits near 1; the angle of a chord of length d does not.
    return 2 * torch.asin(_distance_from(_overlap(c)) / 2)


def _distance_from(overlap: Tensor) -> Tensor:
    """√(2 − 2 overlap), where an overlap that rounding put above 1 counts as 1."""
    squared = 2 - 2 * overlap
    slack = 1e-12 if overlap.dtype == torch.float64 else 1e-6
    rounding = (squared <= 0) & (squared >= -2 * slack)
    safe = torch.where(rounding, torch.ones_like(squared), squared)
    return torch.where(rounding, torch.zeros_like(squared), safe.sqrt())


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
