"""Measures from canonical correlations."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..checks import whole_number
from ..linalg import nuclear_norm, singular, singular_values
from ..stats import Covariances, Scatter
from .define import define
from .transforms import CANONICAL, CANONICAL_LEADING, CANONICAL_SQUARED, CANONICAL_WEIGHTED, canonical_weights

# Facts that these measures share, unless a measure declares otherwise.
by_correlations = functools.partial(
    define, reads=Covariances, bounds=(0, 1), closer="up", precise=True, few_rows="saturates", cost="(n + p + q) p q"
)


def _directions(c: Covariances) -> Tensor:
    """The number of canonical correlations: the smaller of the two ranks."""
    return torch.minimum(c.x.rank, c.y.rank)


@by_correlations(
    invariant={"rotation", "scale", "shift", "linear"},
    paper="raghu2017",
    chance="grows with (p + q) / n, 1 at p ≥ n − 1",
    aligned_by=CANONICAL,
)
def mean_cca(c: Covariances) -> Tensor:
    """Mean canonical correlation, over as many as the smaller rank.

    1 for any two sites with at least n − 1 neurons. A direction counts down to 1e-5 of the largest, as standard
    deviations of neurons that are scaled to one size; down to 1e-12 if the rows are in memory with more digits than
    float32. A caveat reports directions of the data that are dropped.
    """
    return c.correlated / _directions(c)


@by_correlations(
    invariant={"rotation", "scale", "shift", "linear"},
    all_pairs=True,
    paper="kornblith2019",
    chance="max(p, q) / (n − 1)",
    aligned_by=CANONICAL_SQUARED,
)
def cca_r2(c: Covariances) -> Tensor:
    """Mean squared canonical correlation (R²_CCA), over as many as the smaller rank; saturates like mean_cca."""
    return c.shared / _directions(c)


@by_correlations(
    invariant={"rotation", "scale", "shift"},
    paper="raghu2017",
    chance="grows with the directions kept over n",
    aligned_by=CANONICAL_LEADING,
)
def svcca(c: Covariances, keep: float = 0.99, directions: int | None = None) -> Tensor:
    """Mean canonical correlation of the leading principal components that hold `keep` of each side's variance.

    `directions` is a fixed number of components of each side instead.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"svcca keeps a share of the variance between 0 and 1, got keep={keep!r}")
    shares = (keep, keep) if directions is None else tuple(_share_of(s, directions) for s in (c.x, c.y))
    if (spaces := c.leading(shares, directions)) is not None:
        x, y = spaces
        return x.cosines(y, c.order) / min(x.columns.shape[1], y.columns.shape[1])
    (whitener_x, count_x), (whitener_y, count_y) = (
        side.leading(share) for side, share in zip((c.x, c.y), shares, strict=True)
    )
    most = min(count_x, count_y)
    return nuclear_norm(whitener_x @ c.xy @ whitener_y.T, most) / most


def _share_of(side: Scatter, directions: int) -> float:
    """The share of the variance that so many leading principal components hold."""
    values = side.variances
    whole_number(directions, "directions of svcca", least=1)
    if directions > len(values):
        raise ValueError(f"svcca(directions={directions}): a side varies in {len(values)} directions only")
    return float(values[:directions].sum() / values.sum())


@by_correlations(
    invariant={"permutation", "scale", "shift"},
    symmetric=False,
    differentiable=False,
    paper="morcos2018",
    chance="grows with (p + q) / n",
    aligned_by=CANONICAL_WEIGHTED,
)
def pwcca(c: Covariances) -> Tensor:
    """Canonical correlations weighted by how much of x each direction accounts for.

    Σ αᵢ ρᵢ / Σ αᵢ with αᵢ = Σⱼ |⟨hᵢ, xⱼ⟩|, where hᵢ is the i-th canonical variable of x and xⱼ its centred neurons.
    Weighted by x, whichever side is narrower (the authors' code weights by the side of lower rank; others weight by y,
    or by the projections of the neurons), over as many directions as the smaller rank. Directions of equal correlations
    are arbitrary, such as the p + q − n + 1 whose correlation is 1 for any rows: they have the mean weight over all
    choices, where other packages have that of one (up to 0.01 apart). It has no gradient there, so none at all.
    """
    if c.saturated:
        return c.x.matrix.new_ones(())
    u, correlations, _ = singular(c.whitened)
    count = int(_directions(c))
    correlations = correlations[:count]
    weights = canonical_weights(u[:, :count], correlations, c.whitened_neurons, int(c.x.rank), c.resolution)
    return (weights * correlations).sum() / weights.sum()


# Mutual information of two sets of rows in nats, as if the rows were Gaussian


def of_independent_rows(n: int, r: int, s: int) -> tuple[float, float]:
    """Mean and standard deviation of the estimate for n independent Gaussian rows of r and s dimensions, exactly.

    exp(−2 I) is then Wilks' Λ, a product of independent beta variables. The mean is also the bias of the estimate for
    any information: E ln|S| − ln|Σ| depends only on n and the dimensions.
    """
    if n <= r + s:
        return math.nan, math.nan
    steps = torch.arange(1, min(r, s) + 1, dtype=torch.float64)
    whole, rest = (n - steps) / 2, (n - max(r, s) - steps) / 2
    mean = (torch.digamma(whole) - torch.digamma(rest)).sum() / 2
    variance = (torch.polygamma(1, rest) - torch.polygamma(1, whole)).sum() / 4
    return float(mean), math.sqrt(variance)


@by_correlations(
    bounds=(0, None),
    invariant={"linear", "shift"},
    paper="gelfand1959",
    few_rows="infinite",
    chance="about p q / 2n",
    by_chance=of_independent_rows,
)
def gaussian_information(c: Covariances) -> Tensor:
    """Mutual information in nats, as if rows were Gaussian: −½ Σ ln(1 − ρ²) over the canonical correlations ρ.

    Equal to ½ (ln|Σx| + ln|Σy| − ln|Σ|), with Σ the covariance of both sides together; often printed without the ½.
    Only linear relations count: rows that are not Gaussian may share more, or less. An error where it is infinite: for
    rows with themselves, where a direction of one side is a linear function of the other (1 − ρ² ≤ 1e-10, or 100 times
    its rounding where neurons are nearly dependent), and whenever n ≤ p + q (the ranks).

    Biased up by ½ Σ (ψ((n − i)/2) − ψ((n − p − i)/2)), i = 1 … q, exactly so for Gaussian rows and for any information:
    that is the value at chance, so value − null is unbiased.
    """
    n, r, s = min(c.x.n, c.y.n), int(c.x.rank), int(c.y.rank)
    if n <= r + s:
        raise ValueError(
            f"infinite: with {r} and {s} dimensions for n={n} rows, {r + s - n + 1} of {min(r, s)} canonical "
            f"correlations are 1 for any rows; take more than {r + s} rows, or narrower sites (rows='mean' pools)"
        )
    correlations = singular_values(c.whitened)
    least = c.resolution
    ones = int((1 - correlations.detach().square() <= least).sum())
    if ones:
        raise ValueError(
            f"infinite: {ones} of {min(r, s)} canonical correlations are 1 (1 − ρ² ≤ {least:.0e}): a part of one side "
            "is a linear function of the other; mean_cca has a value here"
        )
    return -torch.log1p(-correlations.square()).sum() / 2
