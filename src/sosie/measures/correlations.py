"""Measures from canonical correlations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import leading_count, nuclear_norm, singular
from ..stats import Covariances
from .define import define


def _directions(c: Covariances) -> Tensor:
    """How many canonical correlations there are: the smaller of the two ranks."""
    return torch.minimum(c.x.rank, c.y.rank)


@define(
    reads=Covariances,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale", "shift", "linear"},
    symmetric=True,
    precise=True,
    paper="raghu2017",
    cost="(n + p + q) p q",
    few_rows="saturates",
    chance="grows with (p + q) / n, 1 at p ≥ n − 1",
)
def mean_cca(c: Covariances) -> Tensor:
    """Mean canonical correlation, over as many as the smaller rank.

    1 for any two sites that have at least as many neurons as there are rows, less one. A direction counts down to 1e-5
    of the largest, as standard deviations of neurons that are scaled to one size; down to 1e-12 where the rows are at
    hand and carry more digits than float32's. A caveat says where one that the data have is dropped.
    """
    most = _directions(c)
    return nuclear_norm(c.whitened, most) / most


@define(
    reads=Covariances,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale", "shift", "linear"},
    symmetric=True,
    precise=True,
    paper="kornblith2019",
    cost="(n + p + q) p q",
    few_rows="saturates",
    chance="max(p, q) / (n − 1)",
)
def cca_r2(c: Covariances) -> Tensor:
    """Mean squared canonical correlation (R²_CCA), over as many as the smaller rank; saturates like mean_cca."""
    return c.whitened.square().sum() / _directions(c)


@define(
    reads=Covariances,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    precise=True,
    paper="raghu2017",
    cost="(n + p + q) p q",
    few_rows="saturates",
    chance="grows with the directions kept over n",
)
def svcca(c: Covariances, keep: float = 0.99) -> Tensor:
    """Mean canonical correlation of the leading principal components that hold `keep` of each side's variance."""
    if not 0 < keep <= 1:
        raise ValueError(f"svcca keeps a share of the variance between 0 and 1, got keep={keep!r}")
    if (components := c.principal(keep)) is not None:
        shared, *sizes = components
        count_x, count_y = (leading_count(size.square(), keep) for size in sizes)
        kept = shared[:count_x, :count_y]
    else:
        (x, count_x), (y, count_y) = (side.leading(keep) for side in (c.x, c.y))
        kept = x @ c.xy @ y.T
    most = min(count_x, count_y)
    return nuclear_norm(kept, most) / most


@define(
    reads=Covariances,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"permutation", "scale", "shift"},
    symmetric=False,
    differentiable=False,
    precise=True,
    paper="morcos2018",
    cost="(n + p + q) p q",
    few_rows="saturates",
    chance="grows with (p + q) / n",
)
def pwcca(c: Covariances) -> Tensor:
    """Canonical correlations weighted by how much of x each direction accounts for.

    Σ αᵢ ρᵢ / Σ αᵢ with αᵢ = Σⱼ |⟨hᵢ, xⱼ⟩|: hᵢ the i-th canonical variable of x, xⱼ its centred neurons.
    Always weighted by x, whichever side is narrower (the authors' code weights by the side of lower rank;
    others weight by y, or by the neurons' projections). The directions are those with ρᵢ defined: as many
    as the smaller rank. No gradient is promised: where two correlations are equal, as all are for a site
    with itself, their directions are arbitrary.
    """
    u, correlations, _ = singular(c.whitened)
    count = int(_directions(c))
    weights = (u.T @ c.whitened_neurons).abs().sum(1)
    return (weights[:count] * correlations[:count]).sum() / weights[:count].sum()
