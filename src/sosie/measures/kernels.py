"""Measures that are cosines of Gram matrices."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from ..checks import positive as positive_number
from ..linalg import RANK_TOLERANCE, distances, double_centred, eigen, for_numpy, self_product, u_centred
from ..stats import Alignment, DebiasedAlignment, PairedRows, UncentredAlignment
from .define import define

# Facts that these measures share, unless a measure declares otherwise.
of_grams = functools.partial(
    define, bounds=(0, 1), closer="up", invariant={"rotation", "scale", "shift"}, few_rows="biased"
)
of_kernels = functools.partial(of_grams, reads=PairedRows, cost="n² (p + q)")


def _cosine(a: Alignment) -> Tensor:
    return a.xy / (a.xx.sqrt() * a.yy.sqrt())


@of_grams(
    reads=Alignment,
    paper="kornblith2019",
    cost="n p q or n² (p + q)",
    chance="about √(p q / ((n + p)(n + q)))",
)
def linear_cka(a: Alignment) -> Tensor:
    """Cosine of the centred Gram matrices: squared cross-covariance over the product of self-covariance norms.

    Biased upwards when n is not much larger than the widths: independent Gaussians give about
    √(pq / ((n + p)(n + q))), not 0.
    """
    return _cosine(a)


@of_grams(
    reads=DebiasedAlignment,
    bounds=(-1, 1),
    few_rows=None,
    paper="song2012, szekely2014",
    cost="n p q or n b (p + q) for blocks of b rows",
    chance="0",
)
def debiased_cka(a: DebiasedAlignment) -> Tensor:
    """Cosine of the U-centred Gram matrices: linear CKA whose value for independent rows is 0 on average.

    May be negative. Other minibatch versions average ratios or depend on the loader's batch size; this one sums
    numerators and denominators over blocks of a fixed size before dividing.
    """
    return _cosine(a)


@of_grams(
    reads=UncentredAlignment,
    invariant={"rotation", "scale"},
    paper="cristianini2001",
    cost="n p q or n² (p + q)",
    chance="depends on the means",
)
def kernel_alignment(a: UncentredAlignment) -> Tensor:
    """Cosine of the uncentred Gram matrices: a common mean counts as similarity."""
    return _cosine(a)


@of_kernels(paper="kornblith2019", chance="above 0, towards 1 as p grows past n")
def rbf_cka(rows: PairedRows, bandwidth: float = 0.5) -> Tensor:
    """CKA with Gaussian kernels whose width is `bandwidth` times the median distance of the rows.

    exp(−d² / (2 bandwidth² m)), with m the median of all n² squared distances, including the zeros of the diagonal, as
    in the demo of Kornblith et al. Biased upwards like linear CKA.
    """
    bandwidth = positive_number(bandwidth, "bandwidth of rbf_cka")
    k, l = (side.memo(("rbf", bandwidth), lambda x: _gaussian(x, bandwidth), "square") for side in (rows.x, rows.y))
    return (k * l).sum() / (k.norm() * l.norm())


@of_kernels(
    bounds=(-1, 1),
    differentiable=False,
    needs={"inputs"},
    paper="cui2022",
    cost="n² (p + q) + n³",
    chance="above 0, like linear CKA; positive=False: 0",
)
def deconfounded_cka(rows: PairedRows, positive: bool = True) -> Tensor:
    """Linear CKA of the Gram matrices after regressing out that of the inputs.

    CKA of K − α K₀ with α = ⟨K₀, K⟩ / ⟨K₀, K₀⟩ and K₀ the Gram matrix of the inputs, without negative eigenvalues.
    `positive=False` keeps them: the cosine of the two remainders, which may be negative. Rows and inputs are centred
    first, as in linear CKA; in uncentred kernels, which the formula also admits, the means would dominate.
    """
    assert rows.inputs is not None
    k0 = rows.inputs.memo("centred gram", _linear)
    if not positive:
        k, l = (side.memo("remainder", lambda x: _remainder(_linear(x), k0), "square") for side in (rows.x, rows.y))
        return (k * l).sum() / (k.norm() * l.norm())
    # Each Gram matrix is F Fᵀ, with orthogonal columns whose squared lengths are its eigenvalues.
    f, g = (side.memo("deconfounded", lambda x: _deconfounded(_linear(x), k0), "rows") for side in (rows.x, rows.y))
    return (f.T @ g).square().sum() / (f.square().sum(0).norm() * g.square().sum(0).norm())


@of_kernels(
    bounds=(-1, 1),
    differentiable=False,
    paper="szekely2007, szekely2013",
    chance="above 0, towards 1 as p grows past n; unbiased: 0",
)
def distance_correlation(rows: PairedRows, unbiased: bool = False) -> Tensor:
    """Correlation of the two sides' Euclidean distances between rows, zero only for independence.

    √(⟨A, B⟩ / (‖A‖ ‖B‖)) for doubly centred distance matrices, between 0 and 1. `unbiased=True` U-centres them and
    takes no root: the bias-corrected squared distance correlation, 0 on average for independent rows and sometimes
    negative. Packages use this name for either, and for its square.
    """
    centre = u_centred if unbiased else double_centred
    if unbiased and len(rows.x.rows) < 4:
        raise ValueError(f"the unbiased distance correlation needs at least 4 rows, got {len(rows.x.rows)}")
    a, b = (side.memo(("distances", unbiased), lambda x: centre(distances(x)), "square") for side in (rows.x, rows.y))
    cosine = torch.dot(a.flatten(), b.flatten()) / (a.norm() * b.norm())
    if unbiased:
        return cosine
    return torch.where(cosine > 0, cosine, torch.zeros_like(cosine)).sqrt()  # below 0 by rounding only


def _linear(x: Tensor) -> Tensor:
    return self_product((x - x.mean(0, keepdim=True)).T)


def _deconfounded(k: Tensor, k0: Tensor) -> Tensor:
    """(n, r): F with F Fᵀ the remainder of K without negative eigenvalues."""
    values, vectors = eigen(_remainder(k, k0))
    kept = values > RANK_TOLERANCE * k.diagonal().sum()
    return vectors[:, kept] * values[kept].sqrt()


def _remainder(k: Tensor, k0: Tensor) -> Tensor:
    """K after regressing out the Gram matrix of the inputs."""
    strength = k0.square().sum()
    if not bool(strength > 0):
        raise ValueError(f"the inputs do not vary: all {len(k0)} are equal, so there is nothing to regress out")
    rest = k - (k0 * k).sum() / strength * k0
    if not bool(rest.norm() > RANK_TOLERANCE * k.norm()):
        raise ValueError("nothing is left after regressing out the inputs: the rows repeat the inputs")
    return rest


def _gaussian(x: Tensor, bandwidth: float) -> Tensor:
    """The centred Gaussian Gram matrix."""
    x = x - x.mean(0, keepdim=True)  # changes the rounding of distances, not distances
    lengths = x.square().sum(1)
    squares = self_product(x.T).mul_(-2).add_(lengths[:, None]).add_(lengths)  # in place, since these are large
    squares = squares.fill_diagonal_(0).relu_()  # below 0 by rounding only
    middle = _median(squares)
    if not bool(middle > 0):
        raise ValueError(f"rbf_cka needs rows that differ: the median distance of {len(x)} rows is 0")
    return double_centred((squares / (-2 * bandwidth**2 * middle)).exp_())


def _median(values: Tensor) -> Tensor:
    """The median, which is the mean of the two middle values if their number is even."""
    if for_numpy(values):
        return values.new_tensor(np.median(values.numpy()))  # selects both at once
    flat, middle = values.flatten(), (values.numel() + 1) // 2
    first = flat.median()  # the lower of the two
    if values.numel() % 2 or int((flat <= first).sum()) > middle:
        return first
    return (first + torch.where(flat > first, flat, torch.inf).amin()) / 2
