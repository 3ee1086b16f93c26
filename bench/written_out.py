"""Measures as a competent user writes them with NumPy and SciPy: the peers where no package has them, or is as fast.

Each takes paired rows x (n, p) and y (n, q) in float64 and shares no code with sosie.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import orthogonal_procrustes, solve_triangular
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist, pdist
from scipy.stats import rankdata

Array = np.ndarray


def centred(x: Array) -> Array:
    return x - x.mean(0)


def units(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def nuclear(matrix: Array) -> float:
    return float(np.linalg.svd(matrix, compute_uv=False).sum())


# Cosines of Gram matrices


def kernel_alignment(x: Array, y: Array) -> float:
    return float(np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))


def linear_cka(x: Array, y: Array) -> float:
    return kernel_alignment(centred(x), centred(y))


def cka_angle(x: Array, y: Array) -> float:
    return float(np.arccos(linear_cka(x, y)))


def hsic(x: Array, y: Array) -> float:
    return float(np.linalg.norm(centred(x).T @ centred(y)) ** 2 / (len(x) - 1) ** 2)


def debiased_cka(x: Array, y: Array) -> float:
    """In feature space, from norms and lengths (as in the demo of Kornblith et al.)."""
    x, y = centred(x), centred(y)
    n, lengths_x, lengths_y = len(x), (x**2).sum(1), (y**2).sum(1)

    def debiased(norm: float, a: Array, b: Array) -> float:
        return norm**2 - n / (n - 2) * (a @ b) + a.sum() * b.sum() / ((n - 1) * (n - 2))

    xy = debiased(np.linalg.norm(x.T @ y), lengths_x, lengths_y)
    xx = debiased(np.linalg.norm(x.T @ x), lengths_x, lengths_x)
    yy = debiased(np.linalg.norm(y.T @ y), lengths_y, lengths_y)
    return float(xy / np.sqrt(xx * yy))


def double_centred(k: Array) -> Array:
    means = k.mean(0)
    return k - means - means[:, None] + means.mean()


def cosine_of(k: Array, l: Array) -> float:
    return float((k * l).sum() / (np.linalg.norm(k) * np.linalg.norm(l)))


def squares_of(rows: Array) -> Array:
    products = rows @ rows.T
    lengths = np.diag(products)
    return lengths[:, None] + lengths - 2 * products


def rbf_cka(x: Array, y: Array) -> float:
    def kernel(rows: Array) -> Array:
        squares = squares_of(rows)
        return double_centred(np.exp(-squares / (2 * 0.5**2 * np.median(squares))))

    return cosine_of(kernel(x), kernel(y))


def laplace_cka(x: Array, y: Array) -> float:
    def kernel(rows: Array) -> Array:
        apart = np.sqrt(np.maximum(squares_of(rows), 0))
        return double_centred(np.exp(-apart / np.median(apart)))

    return cosine_of(kernel(x), kernel(y))


def polynomial_cka(x: Array, y: Array) -> float:
    def kernel(rows: Array) -> Array:
        rows = centred(rows)
        return double_centred((rows @ rows.T * (len(rows) / (rows**2).sum()) + 1) ** 3)

    return cosine_of(kernel(x), kernel(y))


def deconfounded_cka(x: Array, y: Array, inputs: Array) -> float:
    given = centred(inputs) @ centred(inputs).T

    def kernel(rows: Array) -> Array:
        k = centred(rows) @ centred(rows).T
        values, vectors = np.linalg.eigh(k - (given * k).sum() / (given * given).sum() * given)
        return (vectors * np.maximum(values, 0)) @ vectors.T

    return cosine_of(kernel(x), kernel(y))


def distance_correlation(x: Array, y: Array) -> float:
    return cosine_of(double_centred(cdist(x, x)), double_centred(cdist(y, y))) ** 0.5


def distance_correlation_of_resi(x: Array, y: Array) -> float:
    """As in ReSi (Klabunde et al., 2025): distances by scikit-learn, which takes one product of the rows."""
    from sklearn.metrics import pairwise_distances

    a, b = (pairwise_distances(rows, metric="euclidean") for rows in (x, y))
    a, b = (d - d.mean(0, keepdims=True) - d.mean(1, keepdims=True) + d.mean() for d in (a, b))
    return float(np.sqrt((a * b).mean() / np.sqrt((a * a).mean() * (b * b).mean())))


def cknna(x: Array, y: Array, k: int = 10) -> float:
    def kernel(rows: Array) -> tuple[Array, Array]:
        cosines = units(rows) @ units(rows).T
        near = np.zeros(cosines.shape)
        np.put_along_axis(near, _nearest(cosines, k), 1.0, 1)
        return cosines - cosines.mean(1, keepdims=True), near

    (a, near_a), (b, near_b) = kernel(x), kernel(y)
    return float((a * b * near_a * near_b).sum() / np.sqrt((a * a * near_a).sum() * (b * b * near_b).sum()))


# Canonical correlations


def canonical_correlations(x: Array, y: Array) -> Array:
    return np.linalg.svd(np.linalg.qr(centred(x))[0].T @ np.linalg.qr(centred(y))[0], compute_uv=False)


def mean_cca(x: Array, y: Array) -> float:
    return float(canonical_correlations(x, y).mean())


def cca_r2(x: Array, y: Array) -> float:
    product = np.linalg.qr(centred(x))[0].T @ np.linalg.qr(centred(y))[0]
    return float((product**2).sum() / min(product.shape))


def gaussian_information(x: Array, y: Array) -> float:
    """From entropies: log-determinants of the covariances of x, of y and of both."""
    x_alone, y_alone, both = (np.linalg.slogdet(np.cov(side.T))[1] for side in (x, y, np.c_[x, y]))
    return float(x_alone + y_alone - both) / 2


def svcca(x: Array, y: Array) -> float:
    def leading(rows: Array) -> Array:
        u, s, _ = np.linalg.svd(centred(rows), full_matrices=False)
        return u[:, : int(np.searchsorted(np.cumsum(s**2) / (s**2).sum(), 0.99)) + 1]

    return float(np.linalg.svd(leading(x).T @ leading(y), compute_uv=False).mean())


def pwcca(x: Array, y: Array) -> float:
    x = centred(x)
    basis = np.linalg.qr(x)[0]
    u, correlations, _ = np.linalg.svd(basis.T @ np.linalg.qr(centred(y))[0])
    weights = np.abs((basis @ u).T @ x).sum(1)
    return float(weights @ correlations / weights.sum())


def eigenspace_overlap(x: Array, y: Array) -> float:
    return cca_r2(x, y) * min(x.shape[1], y.shape[1]) / max(x.shape[1], y.shape[1])


def regression_r2(x: Array, y: Array) -> float:
    x, y = centred(x), centred(y)
    return float(((np.linalg.qr(x)[0].T @ y) ** 2).sum() / (y**2).sum())


def gulp(x: Array, y: Array, lam: float = 0.01) -> float:
    x, y = (centred(rows) / np.linalg.norm(centred(rows)) for rows in (x, y))

    def factor(rows: Array) -> Array:
        return np.linalg.cholesky(rows.T @ rows + lam * np.eye(rows.shape[1]))

    def product(a: Array, left: Array, b: Array, right: Array) -> float:
        half = solve_triangular(left, a.T @ b, lower=True)
        return float((solve_triangular(right, half.T, lower=True) ** 2).sum())

    f, g = factor(x), factor(y)
    return (product(x, f, x, f) + product(y, g, y, g) - 2 * product(x, f, y, g)) ** 0.5


# Shapes


def normalized_bures(x: Array, y: Array) -> float:
    x, y = centred(x), centred(y)
    return nuclear(x.T @ y) / float(np.linalg.norm(x) * np.linalg.norm(y))


def procrustes_distance(x: Array, y: Array) -> float:
    return (2 - 2 * normalized_bures(x, y)) ** 0.5


def normalized_bures_of_gulp(x: Array, y: Array) -> float:
    """From what GULP (Boix-Adsera et al., 2022) has for Procrustes: norms and the nuclear norm, over the rows."""
    n, x, y = len(x), centred(x), centred(y)
    overlap = np.linalg.norm(x.T @ y, ord="nuc") / n
    return float(overlap / np.sqrt((x**2).sum() / n * ((y**2).sum() / n)))


def procrustes_distance_of_sim_metric(x: Array, y: Array) -> float:
    """As Ding et al. (2021): the squared distance of centred rows of unit norm; here its root."""
    x, y = centred(x), centred(y)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return float(np.sqrt((x**2).sum() + (y**2).sum() - 2 * np.linalg.norm(x.T @ y, ord="nuc")))


def procrustes_angle(x: Array, y: Array) -> float:
    return float(np.arccos(normalized_bures(x, y)))


def raw_procrustes_distance(x: Array, y: Array) -> float:
    x, y = centred(x), centred(y)
    return float(np.sqrt((x**2).sum() + (y**2).sum() - 2 * nuclear(x.T @ y)))


def shape_angle(x: Array, y: Array, alpha: float = 0.5) -> float:
    def mapped(rows: Array) -> Array:
        rows = centred(rows)
        rows = rows / np.sqrt((rows**2).sum() / len(rows) / rows.shape[1])
        values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
        return rows @ (alpha * np.eye(len(values)) + (1 - alpha) * (vectors / np.sqrt(values)) @ vectors.T)

    return procrustes_angle(mapped(x), mapped(y))


def bures_distance(x: Array, y: Array) -> float:
    x, y = (np.linalg.qr(centred(rows), mode="r") / len(rows) ** 0.5 for rows in (x, y))
    return float(np.sqrt((x**2).sum() + (y**2).sum() - 2 * nuclear(x @ y.T)))


def aligned_cosine(x: Array, y: Array) -> float:
    turned = x @ orthogonal_procrustes(x, y)[0]
    return float(((turned * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))).mean())


# Neurons


def _matched(scores: Array) -> Array:
    return scores[linear_sum_assignment(scores, maximize=True)]


def permutation_procrustes_distance(x: Array, y: Array) -> float:
    x, y = centred(x), centred(y)
    return float(np.sqrt(2 - 2 * _matched(x.T @ y).sum() / (np.linalg.norm(x) * np.linalg.norm(y))))


def _correlations(x: Array, y: Array) -> Array:
    x, y = ((rows - rows.mean(0)) / rows.std(0) for rows in (x, y))
    return x.T @ y / len(x)


def hard_correlation_match(x: Array, y: Array) -> float:
    return float(_matched(_correlations(x, y)).mean())


def soft_correlation_match(x: Array, y: Array) -> float:
    return float(_correlations(x, y).max(1).mean())


# Rows


def rsa(x: Array, y: Array) -> float:
    a, b = (rankdata(1 - np.corrcoef(rows)[np.triu_indices(len(rows), 1)]) for rows in (x, y))
    return float(np.corrcoef(a, b)[0, 1])


def rsa_by_pdist(x: Array, y: Array) -> float:
    return float(np.corrcoef(rankdata(pdist(x, "correlation")), rankdata(pdist(y, "correlation")))[0, 1])


def rsm_norm_difference(x: Array, y: Array) -> float:
    return float(np.linalg.norm(units(x) @ units(x).T - units(y) @ units(y).T) / len(x))


def _nearest(scores: Array, k: int) -> Array:
    scores = scores.copy()
    np.fill_diagonal(scores, -np.inf)
    return np.argpartition(scores, -k, axis=1)[:, -k:]


def _in_order(scores: Array, k: int) -> Array:
    near = _nearest(scores, k)
    return np.take_along_axis(near, np.argsort(-np.take_along_axis(scores, near, 1), axis=1), 1)


def both_lists(x: Array, y: Array, k: int = 10) -> tuple[Array, Array]:
    """(n, k) each: the nearest other rows by cosine, nearest first."""
    a, b = (_in_order(units(rows) @ units(rows).T, k) for rows in (x, y))
    return a, b
