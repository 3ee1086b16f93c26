"""Representational similarity analysis: compare the dissimilarities between rows of two sides."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import distances, double_centred, squared_distances, upper_triangle
from ..stats import PairedRows, Sample, SiteRows
from .define import define
from .neighbours import cosines

ROUNDING = 1e-12  # of the largest dissimilarity; closer ones are ties


@define(
    reads=PairedRows,
    bounds=(-1, 1),
    closer="up",
    invariant={"permutation", "scale"},
    differentiable=False,
    paper="kriegeskorte2008, nili2014, diedrichsen2020",
    cost="n² (p + q + log n)",
    chance="0; by cosine above 0",
)
def rsa(rows: PairedRows, dissimilarity: str = "correlation", compare: str = "spearman") -> Tensor:
    """Similarity of the two sides' dissimilarities of all pairs of rows.

    The dissimilarity of two rows is 1 − Pearson correlation ("correlation"), "euclidean", "squared_euclidean",
    1 − cosine ("cosine"), or "mahalanobis" (Euclidean after whitening by the covariance of the rows). Dissimilarities
    are compared by "spearman" (average ranks for ties), "pearson", "kendall" (τ-a, which ties lower), "cosine", or
    "whitened_cosine": the cosine after whitening the correlations of dissimilarities that share rows, which is linear
    CKA for squared Euclidean ones. Defaults differ: Kriegeskorte et al. use correlation and Spearman, as here;
    rsatoolbox compares by cosine, and can whiten by the noise covariance of repeated trials.
    """
    if dissimilarity not in DISSIMILARITIES or compare not in COMPARATORS:
        raise ValueError(
            f"rsa knows the dissimilarities {', '.join(DISSIMILARITIES)} and the comparators "
            f"{', '.join(COMPARATORS)}; got {dissimilarity!r} and {compare!r}"
        )
    if len(rows.x.rows) < 3:
        raise ValueError(f"rsa needs at least 3 rows, got {len(rows.x.rows)}")
    if compare == "kendall":
        return _kendall(*(_triangle(side, dissimilarity) for side in (rows.x, rows.y)))
    x, y = (
        side.memo(
            ("rsa", dissimilarity, compare),
            lambda r: _unit(COMPARATORS[compare](upper_triangle(DISSIMILARITIES[dissimilarity](r)), len(r))),
            "square" if compare == "whitened_cosine" else "triangle",
        )
        for side in (rows.x, rows.y)
    )
    return torch.dot(x.flatten(), y.flatten())


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


def _triangle(side: SiteRows, dissimilarity: str) -> Tensor:
    key = ("dissimilarities", dissimilarity)
    return side.memo(key, lambda r: _with_ties(upper_triangle(DISSIMILARITIES[dissimilarity](r))), "triangle")


def _with_ties(values: Tensor) -> Tensor:
    """The values in steps of the rounding error, so that pairs that differ by rounding are ties."""
    step = ROUNDING * values.abs().amax()
    return torch.where(step > 0, torch.round(values / step) * step, values)


def _unit(values: Tensor) -> Tensor:
    length = values.norm()
    if not bool(length > 0):
        raise ValueError("rsa is undefined: all rows are equally far apart")
    return values / length


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


def _centred(values: Tensor, _: int) -> Tensor:
    about = values - values.mean()
    low, high = about.aminmax()
    return about if bool(high - low > ROUNDING * values.abs().amax()) else torch.zeros_like(about)


def _ranks(values: Tensor, _: int) -> Tensor:
    """Average ranks, less their mean."""
    _, inverse, counts = _with_ties(values).unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).to(values.dtype)
    ranks = (last - (counts.to(values.dtype) - 1) / 2)[inverse]
    return ranks - ranks.mean()


def _whitened(values: Tensor, n: int) -> Tensor:
    """The doubly centred matrix of dissimilarities, equivalent to whitening the effect of shared rows."""
    square = values.new_zeros(n, n)
    i, j = torch.triu_indices(n, n, 1, device=values.device)
    square[i, j] = square[j, i] = values
    return double_centred(square)


def _kendall(x: Tensor, y: Tensor) -> Tensor:
    """τ-a: concordant less discordant pairs, over all pairs; ties count as neither."""
    from scipy.stats import kendalltau

    a, b = (side.cpu().numpy() for side in (x, y))
    tau_b = float(kendalltau(a, b, variant="b").statistic)
    if tau_b != tau_b:
        raise ValueError("rsa is undefined: all rows are equally far apart")
    untied = [1 - _tied(side) for side in (x, y)]
    return x.new_tensor(tau_b * (untied[0] * untied[1]) ** 0.5)


def _tied(values: Tensor) -> float:
    """Share of pairs of entries that are equal."""
    counts = values.unique(return_counts=True)[1].double()
    return float((counts * (counts - 1)).sum()) / (len(values) * (len(values) - 1))


DISSIMILARITIES = {
    "correlation": _correlation,
    "euclidean": distances,
    "squared_euclidean": squared_distances,
    "cosine": lambda x: 1 - cosines(x),
    "mahalanobis": _mahalanobis,
}
COMPARATORS = {
    "spearman": _ranks,
    "pearson": _centred,
    "kendall": lambda values, _: values,
    "cosine": lambda values, _: values,
    "whitened_cosine": _whitened,
}
