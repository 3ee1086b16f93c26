"""Measures that are cosines of Gram matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..checks import positive as positive_number
from ..checks import whole_number
from ..linalg import RANK_TOLERANCE, distances, double_centred, eigen, for_numpy, self_product, u_centred
from ..stats import Alignment, DebiasedAlignment, PairedRows, UncentredAlignment
from .define import define

LARGEST_EXPONENT, SMALLEST_EXPONENT = 30.0, 1e-8  # beyond these a kernel says nothing

# Facts that these measures share, unless a measure declares otherwise.
of_grams = functools.partial(
    define, bounds=(0, 1), closer="up", invariant={"rotation", "scale", "shift"}, few_rows="biased"
)
of_kernels = functools.partial(of_grams, reads=PairedRows, all_pairs=True, cost="n² (p + q)")


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


DEBIASED = {"bounds": (-1.0, 1.0), "few_rows": None, "chance": "0"}
FIXED = {"invariant": frozenset({"permutation", "rotation", "shift"})}  # of a kernel in the units of the rows
of_any_kernel = functools.partial(
    of_kernels,
    paper="kornblith2019",
    chance="above 0, towards 1 as p grows past n; debiased: 0",
    with_options={"debiased": DEBIASED, "width": FIXED, "gamma": FIXED},
)


@of_any_kernel()
def rbf_cka(rows: PairedRows, bandwidth: float = 0.5, width: float | None = None, debiased: bool = False) -> Tensor:
    """CKA with Gaussian kernels whose width is `bandwidth` times the median distance of the rows.

    exp(−d² / (2 bandwidth² m)), with m the median of all n² squared distances, including the zeros of the diagonal, as
    in the demo of Kornblith et al. `width` is a fixed width for both sides instead, exp(−d² / (2 width²)): scale then
    matters. Biased upwards like linear CKA; `debiased=True` U-centres the kernels, as debiased_cka does.
    """

    def kernel(x: Tensor) -> Tensor:
        squares = _squared_distances(x)
        divisor = _divisor(squares, bandwidth * bandwidth, "rbf_cka") if width is None else width * width
        return _varying(squares / (-2 * divisor), "rbf_cka").exp_()

    bandwidth = positive_number(bandwidth, "bandwidth of rbf_cka")
    width = None if width is None else positive_number(width, "width of rbf_cka")
    return _kernel_cosine(rows, ("rbf", bandwidth, width), kernel, debiased=debiased)


@of_any_kernel(differentiable=False)
def laplace_cka(rows: PairedRows, bandwidth: float = 1.0, width: float | None = None, debiased: bool = False) -> Tensor:
    """CKA with Laplace kernels exp(−d / w), where the width w is `bandwidth` times the median distance of the rows.

    d is the Euclidean distance (scikit-learn's laplacian_kernel takes the sum of absolute differences), and the median
    is over all n² distances, including the zeros of the diagonal. `width` and `debiased` are as in rbf_cka.
    """

    def kernel(x: Tensor) -> Tensor:
        apart = distances(x)
        divisor = _divisor(apart, bandwidth, "laplace_cka") if width is None else width
        return _varying(apart / -divisor, "laplace_cka").exp_()

    bandwidth = positive_number(bandwidth, "bandwidth of laplace_cka")
    width = None if width is None else positive_number(width, "width of laplace_cka")
    return _kernel_cosine(rows, ("laplace", bandwidth, width), kernel, debiased=debiased)


@of_any_kernel()
def polynomial_cka(
    rows: PairedRows, degree: int = 3, offset: float = 1.0, gamma: float | None = None, debiased: bool = False
) -> Tensor:
    """CKA with polynomial kernels (γ ⟨x, x′⟩ + offset)^degree of centred rows, of mean squared length 1/γ.

    Scaled so, neither mean nor scale matters; `gamma` is a fixed γ for both sides instead, and scale then matters.
    Degree 1 is linear CKA. Biased upwards; `debiased=True` U-centres the kernels, as debiased_cka does.
    """
    whole_number(degree, "degree of polynomial_cka", least=1)
    if offset != 0:  # below 0 it is no kernel
        offset = positive_number(offset, "offset of polynomial_cka, if not 0,")

    def kernel(x: Tensor) -> Tensor:
        gram = _linear(x)
        return (gram * (len(x) / gram.diagonal().sum() if gamma is None else gamma) + offset) ** degree

    gamma = None if gamma is None else positive_number(gamma, "gamma of polynomial_cka")
    return _kernel_cosine(rows, ("polynomial", degree, offset, gamma), kernel, debiased=debiased)


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
        return rows.inner("remainder", lambda x: _unit(_remainder(_linear(x), k0)), "square")
    return rows.inner("deconfounded", lambda x: _unit(_deconfounded(_linear(x), k0)), "square")


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
    if unbiased and rows.n < 4:
        raise ValueError(f"the unbiased distance correlation needs at least 4 rows, got {rows.n}")
    cosine = rows.inner(("distances", unbiased), lambda x: _unit(centre(distances(x))), "square")
    if unbiased:
        return cosine
    return torch.where(cosine > 0, cosine, torch.zeros_like(cosine)).sqrt()  # below 0 by rounding only


def _linear(x: Tensor) -> Tensor:
    return self_product((x - x.mean(0, keepdim=True)).T)


def _deconfounded(k: Tensor, k0: Tensor) -> Tensor:
    """The remainder of K without negative eigenvalues."""
    values, vectors = eigen(_remainder(k, k0))
    kept = values > RANK_TOLERANCE * k.diagonal().sum()
    return self_product((vectors[:, kept] * values[kept].sqrt()).T)


def _remainder(k: Tensor, k0: Tensor) -> Tensor:
    """K after regressing out the Gram matrix of the inputs."""
    strength = k0.square().sum()
    if not bool(strength > 0):
        raise ValueError(f"the inputs do not vary: all {len(k0)} are equal, so there is nothing to regress out")
    rest = k - (k0 * k).sum() / strength * k0
    if not bool(rest.norm() > RANK_TOLERANCE * k.norm()):
        raise ValueError("nothing is left after regressing out the inputs: the rows repeat the inputs")
    return rest


def _kernel_cosine(rows: PairedRows, key: object, kernel: Callable[[Tensor], Tensor], *, debiased: bool) -> Tensor:
    """The cosine of both sides' kernel matrices, doubly centred or U-centred; made once for each site."""
    if debiased and rows.n < 4:
        raise ValueError(f"a debiased CKA needs at least 4 rows, got {rows.n}")
    centre = u_centred if debiased else double_centred
    return rows.inner((key, debiased), lambda x: _unit(centre(kernel(x))), "square")


def _unit(kernel: Tensor) -> Tensor:
    return kernel / kernel.norm()


def _squared_distances(x: Tensor) -> Tensor:
    x = x - x.mean(0, keepdim=True)  # changes the rounding of distances, not distances
    lengths = x.square().sum(1)
    squares = self_product(x.T).mul_(-2).add_(lengths[:, None]).add_(lengths)  # in place, since these are large
    return squares.fill_diagonal_(0).relu_()  # below 0 by rounding only


def _divisor(apart: Tensor, bandwidth: float, name: str) -> Tensor:
    """The width that the distances give, or its square from squared distances."""
    middle = _median(apart)
    if not bool(middle > 0):
        raise ValueError(f"{name} needs rows that differ: the median distance of {len(apart)} rows is 0")
    return bandwidth * middle


def _varying(exponents: Tensor, name: str) -> Tensor:
    """The exponents of a kernel; an error if its width is so large or small that they do not tell rows apart."""
    if bool(exponents.detach().amin() > -SMALLEST_EXPONENT):
        raise ValueError(f"{name} sees all rows as equal: take a smaller width or bandwidth")
    nearest = exponents.fill_diagonal_(-torch.inf).detach().amax()
    if bool(nearest < -LARGEST_EXPONENT):
        raise ValueError(f"{name} sees each row as like itself alone: take a larger width or bandwidth")
    return exponents.fill_diagonal_(0)


def _median(values: Tensor) -> Tensor:
    """The median, which is the mean of the two middle values if their number is even."""
    if for_numpy(values):
        return values.new_tensor(np.median(values.numpy()))  # selects both at once
    flat, middle = values.flatten(), (values.numel() + 1) // 2
    first = flat.median()  # the lower of the two
    if values.numel() % 2 or int((flat <= first).sum()) > middle:
        return first
    return (first + torch.where(flat > first, flat, torch.inf).amin()) / 2
