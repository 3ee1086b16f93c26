"""Representational similarity analysis: compare the dissimilarities between rows of two sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..linalg import distances, squared_distances, upper_triangle
from ..stats import PairedRows, Sample, SiteRows
from .define import define
from .neighbours import cosines

ROUNDING = 1e-12  # of the largest dissimilarity; closer ones are ties


@define(
    reads=PairedRows,
    bounds=(-1, 1),
    closer="up",
    invariant={"permutation", "scale"},
    all_pairs=True,
    differentiable=False,
    paper="kriegeskorte2008, nili2014, diedrichsen2020",
    cost="n² (p + q + log n)",
    chance="0; by cosine above 0",
)
def rsa(rows: PairedRows, dissimilarity: str = "correlation", compare: str = "spearman") -> Tensor:
    """Similarity of the two sides' dissimilarities of all pairs of rows.

    The dissimilarity of two rows is 1 − Pearson correlation ("correlation"), "euclidean", "squared_euclidean",
    1 − cosine ("cosine"), or "mahalanobis" (Euclidean after whitening by the covariance of the rows). Dissimilarities
    are compared by "spearman" (average ranks for ties), "rho_a" (its mean over random orders of tied ranks), "pearson",
    "kendall" (τ-a, which ties lower), "kendall_b" (τ-b), "cosine", or "whitened_cosine" and "whitened_pearson": after
    whitening the correlations of dissimilarities that share rows, which makes the cosine of squared Euclidean ones
    linear CKA. Defaults differ: Kriegeskorte et al. use correlation and Spearman, as here; rsatoolbox compares by
    cosine, and can whiten by the noise covariance of repeated trials.
    """
    if dissimilarity not in DISSIMILARITIES or compare not in (*COMPARATORS, *KENDALL):
        raise ValueError(
            f"rsa knows the dissimilarities {', '.join(DISSIMILARITIES)} and the comparators "
            f"{', '.join((*COMPARATORS, *KENDALL))}; got {dissimilarity!r} and {compare!r}"
        )
    if rows.n < 3:
        raise ValueError(f"rsa needs at least 3 rows, got {rows.n}")
    if compare in KENDALL:
        return kendall(compare, *(_triangle(side, dissimilarity) for side in (rows.x, rows.y)))
    return rows.inner(
        ("rsa", dissimilarity, compare),
        lambda r: to_length(compare, COMPARATORS[compare](upper_triangle(DISSIMILARITIES[dissimilarity](r)), len(r))),
        "triangle",
    )


@define(
    reads=PairedRows,
    bounds=(0, 2),
    closer="down",
    invariant={"rotation", "scale"},
    differentiable=False,
    paper="yin2018, klabunde2025",
    cost="n² (p + q)",
    chance="above 0: the root of both matrices' spread",
)
def rsm_norm_difference(rows: PairedRows) -> Tensor:
    """Root mean square difference of the two sides' cosine similarities of all pairs of rows.

    ‖S − S′‖ / n with the Frobenius norm, often printed without the n. Elsewhere S may be inner products or distances
    instead of cosines; then scale matters.
    """
    x, y = (side.memo("cosines", cosines, "square") for side in (rows.x, rows.y))
    return (x - y).norm() / len(x)


def _vector(rows: Tensor, dissimilarity: str, compare: str) -> Tensor:
    values = upper_triangle(DISSIMILARITIES[dissimilarity](rows))
    return to_length(compare, COMPARATORS[compare](values, len(rows)))


def _triangle(side: SiteRows, dissimilarity: str) -> Tensor:
    key = ("dissimilarities", dissimilarity)
    return side.memo(key, lambda r: _with_ties(upper_triangle(DISSIMILARITIES[dissimilarity](r))), "triangle")


def _with_ties(values: Tensor) -> Tensor:
    """The values in steps of the rounding error, so that pairs that differ by rounding are ties."""
    step = ROUNDING * values.abs().amax(-1, keepdim=True)
    return torch.where(step > 0, torch.round(values / step) * step, values)


def _correlation(x: Tensor) -> Tensor:
    if x.shape[1] < 2:
        raise ValueError("rows of one column have no correlation; use rsa(dissimilarity='euclidean')")
    noise = 8 * torch.finfo(x.dtype).eps * x.abs().amax(1)
    x = x - x.mean(1, keepdim=True)
    constant = x.abs().amax(1) <= noise
    if bool(constant.any()):
        raise ValueError(
            f"correlations need rows that vary, but {int(constant.sum())} rows are constant; "
            "use rsa(dissimilarity='euclidean')"
        )
    return 1 - cosines(x)


def _mahalanobis(x: Tensor) -> Tensor:
    basis = Sample.of(x, x).basis()
    if basis.shape[1] >= len(x) - 1:
        raise ValueError(
            f"rsa by Mahalanobis distance needs more rows than dimensions: {len(x)} rows of {basis.shape[1]} "
            "dimensions are all equally far apart"
        )
    return distances(basis * len(x) ** 0.5)


# Comparators: of dissimilarities (…, pairs) they make the vectors whose cosine is the similarity


def to_length(compare: str, vectors: Tensor) -> Tensor:
    """The vectors of a comparator so scaled that their inner products are the similarity."""
    lengths = vectors.norm(dim=-1, keepdim=True)
    if not bool((lengths > 0).all()):
        raise ValueError("their similarity is undefined: all stimuli are equally far apart")
    pairs = vectors.shape[-1]
    return vectors * (12 / (pairs**3 - pairs)) ** 0.5 if compare == "rho_a" else vectors / lengths


def _centred(values: Tensor) -> Tensor:
    about = values - values.mean(-1, keepdim=True)
    low, high = about.aminmax(dim=-1, keepdim=True)
    return torch.where(high - low > ROUNDING * values.abs().amax(-1, keepdim=True), about, 0)


def _ranks(values: Tensor) -> Tensor:
    """Average ranks, less their mean."""
    inorder, order = _with_ties(values).sort(-1)
    count = values.shape[-1]
    place = torch.arange(1, count + 1, device=values.device).expand_as(order)
    new = torch.ones_like(order, dtype=torch.bool)
    new[..., 1:] = inorder[..., 1:] != inorder[..., :-1]
    first = torch.where(new, place, 0).cummax(-1).values  # of those that tie
    last = torch.where(new.roll(-1, -1), place, count).flip(-1).cummin(-1).values.flip(-1)
    ranks = (first + last).to(values.dtype).sub_(count + 1).div_(2)
    return torch.empty_like(ranks).scatter_(-1, order, ranks)


def whitened(values: Tensor, n: int) -> Tensor:
    """√2 V^(-½) d, where V is the covariance of squared distances of n rows of independent noise.

    V is (C Cᵀ)² entry by entry, with a row of C for the difference of each pair: 4 for a pair with itself, 1 for pairs
    that share a row, else 0. So V d = 2 d + rᵢ + rⱼ with the sums r of the dissimilarities of each row. Its eigenvalues
    are 2 n for the mean, n for the effects of rows aᵢ + aⱼ, and 2 for the rest.
    """
    i, j = torch.triu_indices(n, n, 1, device=values.device)
    mean = values.mean(-1, keepdim=True)
    effects = (row_sums(values, i, j, n) - (n - 1) * mean) * ((1 - (2 / n) ** 0.5) / (n - 2))
    return values - effects[..., i] - effects[..., j] - (1 - n**-0.5) * mean


def row_sums(values: Tensor, i: Tensor, j: Tensor, n: int) -> Tensor:
    """(…, n): the sums of the dissimilarities of each row."""
    return values.new_zeros(*values.shape[:-1], n).index_add_(-1, i, values).index_add_(-1, j, values)


def kendall(compare: str, x: Tensor, y: Tensor) -> Tensor:
    """Concordant less discordant pairs, over all pairs (τ-a) or by the pairs that are untied on each side (τ-b)."""
    from scipy.stats import kendalltau

    a, b = (side.cpu().numpy() for side in (x, y))
    tau_b = float(kendalltau(a, b, variant="b").statistic)
    if tau_b != tau_b:
        raise ValueError("their similarity is undefined: all stimuli are equally far apart")
    untied = [1 - _tied(side) for side in (a, b)] if compare == "kendall" else [1.0, 1.0]
    return x.new_tensor(tau_b * (untied[0] * untied[1]) ** 0.5)


def _tied(values: np.ndarray[Any, Any]) -> float:
    """Share of pairs of entries that are equal."""
    counts = np.unique(values, return_counts=True)[1].astype(float)
    return float((counts * (counts - 1)).sum()) / (len(values) * (len(values) - 1))


DISSIMILARITIES = {
    "correlation": _correlation,
    "euclidean": distances,
    "squared_euclidean": squared_distances,
    "cosine": lambda x: 1 - cosines(x),
    "mahalanobis": _mahalanobis,
}
COMPARATORS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "spearman": lambda values, n: _ranks(values),
    "rho_a": lambda values, n: _ranks(values),
    "pearson": lambda values, n: _centred(values),
    "cosine": lambda values, n: values,
    "whitened_cosine": whitened,
    "whitened_pearson": lambda values, n: whitened(_centred(values), n),
}
KENDALL = ("kendall", "kendall_b")  # which are no inner products
