"""RSA against rsatoolbox and scipy, for each dissimilarity and comparator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paired import correlated_rows
from scipy.spatial.distance import pdist
from scipy.stats import kendalltau, pearsonr, spearmanr

import sosie
from sosie.measures.dissimilarities import whitened as whitening

METRICS = {
    "correlation": "correlation",
    "euclidean": "euclidean",
    "squared_euclidean": "sqeuclidean",
    "cosine": "cosine",
}


def arrays(n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    x, y = correlated_rows(n=n, p=7, q=5)
    return x.numpy(), y.numpy()


def distances(rows: np.ndarray, dissimilarity: str) -> np.ndarray:
    if dissimilarity == "mahalanobis":
        return pdist(rows, "mahalanobis", VI=np.linalg.inv(np.cov(rows.T, bias=True)))
    return pdist(rows, METRICS[dissimilarity])


def tau_a(a: np.ndarray, b: np.ndarray) -> float:
    """By counting."""
    i, j = np.triu_indices(len(a), 1)
    return float(np.mean(np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])))


def whitened(a: np.ndarray, b: np.ndarray, n: int) -> float:
    """By the covariance that dissimilarities have when rows are independent: V = (C Cᵀ)²."""
    i, j = np.triu_indices(n, 1)
    contrast = np.zeros((len(i), n))
    contrast[np.arange(len(i)), i], contrast[np.arange(len(i)), j] = 1, -1
    inverse = np.linalg.inv((contrast @ contrast.T) ** 2)
    return float(a @ inverse @ b / np.sqrt(a @ inverse @ a * (b @ inverse @ b)))


COMPARATORS = {
    "pearson": lambda a, b, n: pearsonr(a, b)[0],
    "spearman": lambda a, b, n: spearmanr(a, b)[0],
    "rho_a": lambda a, b, n: spearmanr(a, b)[0],
    "kendall": lambda a, b, n: tau_a(a, b),
    "kendall_b": lambda a, b, n: kendalltau(a, b)[0],
    "cosine": lambda a, b, n: a @ b / np.linalg.norm(a) / np.linalg.norm(b),
    "whitened_cosine": whitened,
    "whitened_pearson": lambda a, b, n: whitened(a - a.mean(), b - b.mean(), n),
}


@pytest.mark.parametrize("dissimilarity", [*METRICS, "mahalanobis"])
@pytest.mark.parametrize("compare", COMPARATORS)
def test_every_combination_by_its_definition(dissimilarity: str, compare: str) -> None:
    x, y = arrays(20)
    expected = COMPARATORS[compare](distances(x, dissimilarity), distances(y, dissimilarity), 20)
    found = sosie.measure("rsa", x, y, dissimilarity=dissimilarity, compare=compare)
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("method", "compare"),
    [
        ("cosine", "cosine"),
        ("corr", "pearson"),
        ("spearman", "spearman"),
        ("rho-a", "rho_a"),
        ("tau-a", "kendall"),
        ("tau-b", "kendall_b"),
        ("cosine_cov", "whitened_cosine"),
        ("corr_cov", "whitened_pearson"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_rsatoolbox_says_the_same(method: str, compare: str) -> None:
    rsatoolbox = pytest.importorskip("rsatoolbox", reason="the package rsatoolbox is not installed")
    x, y = arrays(25)
    rdms = [rsatoolbox.rdm.calc_rdm(rsatoolbox.data.Dataset(rows), method="euclidean") for rows in (x, y)]
    expected = rsatoolbox.rdm.compare(*rdms, method=method)[0, 0]  # its "euclidean" is squared
    found = sosie.measure("rsa", x, y, dissimilarity="squared_euclidean", compare=compare)
    assert found == pytest.approx(expected, abs=1e-6)


def test_whitened_cosine_of_squared_distances_is_linear_cka() -> None:
    x, y = arrays()
    found = sosie.measure("rsa", x, y, dissimilarity="squared_euclidean", compare="whitened_cosine")
    assert found == pytest.approx(sosie.measure("linear_cka", x, y), abs=1e-10)


def test_ties_by_rounding_are_ties() -> None:
    """Rows of two columns correlate by 1 or -1 and nothing else: ranks must not rank the rounding."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(30, 2)), random.normal(size=(30, 5))
    exact = np.round(pdist(x, "correlation"))
    assert set(exact) == {0, 2}
    expected = spearmanr(exact, pdist(y, "correlation"))[0]
    assert sosie.measure("rsa", x, y) == pytest.approx(expected, abs=1e-9)
    assert sosie.measure("rsa", x, y, compare="kendall") == pytest.approx(
        tau_a(exact, pdist(y, "correlation")), abs=1e-9
    )
    assert abs(kendalltau(exact, pdist(y, "correlation"))[0]) > abs(tau_a(exact, pdist(y, "correlation")))


def test_rho_a_is_spearman_over_random_orders_of_ties() -> None:
    """12 Σ a b / (P³ − P), by hand for three rows."""
    x, y = np.array([[0.0], [1.0], [2.0]]), np.array([[0.0], [1.0], [3.0]])  # distances 1 2 1 and 1 3 2
    a, b = np.array([1.5, 3, 1.5]) - 2, np.array([1.0, 3, 2]) - 2
    found = sosie.measure("rsa", x, y, dissimilarity="euclidean", compare="rho_a")
    assert found == pytest.approx(12 * (a @ b) / (27 - 3), abs=1e-12) == pytest.approx(0.75)
    orders = [spearmanr([1, 3, 2], order)[0] for order in ((1, 3, 2), (2, 3, 1))]
    assert found == pytest.approx(np.mean(orders), abs=1e-12)


def test_whitening_by_hand_for_four_rows() -> None:
    """V of six pairs: 4 for a pair with itself, 1 where they share a row, 0 for the three pairs that share none."""
    v = np.array(
        [
            [4, 1, 1, 1, 1, 0],
            [1, 4, 1, 1, 0, 1],
            [1, 1, 4, 0, 1, 1],
            [1, 1, 0, 4, 1, 1],
            [1, 0, 1, 1, 4, 1],
            [0, 1, 1, 1, 1, 4],
        ]
    )
    white = whitening(torch.eye(6).double(), 4).numpy()
    assert white @ v @ white.T == pytest.approx(2 * np.eye(6), abs=1e-12)


def test_whitening_is_for_the_covariance_that_noise_gives() -> None:
    """100,000 draws of pure noise: products of two noises estimate distances of 0 without bias."""
    random = np.random.default_rng(0)
    i, j = np.triu_indices(4, 1)
    one, two = random.normal(size=(2, 100_000, 4))
    d = (one[:, i] - one[:, j]) * (two[:, i] - two[:, j])
    white = whitening(torch.from_numpy(d), 4).numpy()
    assert np.cov(white.T) == pytest.approx(2 * np.eye(6), abs=0.06)  # 3.5 standard errors of a variance


def test_what_rsa_cannot_do_is_said() -> None:
    x, y = arrays(20)
    with pytest.raises(ValueError, match="rsa knows the dissimilarities"):
        sosie.measure("rsa", x, y, compare="median")
    with pytest.raises(ValueError, match="needs more rows than dimensions"):
        sosie.measure("rsa", np.random.default_rng(0).normal(size=(10, 12)), y[:10], dissimilarity="mahalanobis")
    with pytest.raises(ValueError, match="1 of 20 rows are all zero"):
        sosie.measure("rsa", x * (np.arange(20) > 0)[:, None], y, dissimilarity="cosine")
    with pytest.raises(ValueError, match="equally far apart"):
        sosie.measure("rsa", np.eye(4), y[:4], dissimilarity="euclidean", compare="kendall")


@pytest.mark.parametrize("dissimilarity", ["euclidean", "squared_euclidean"])
@pytest.mark.parametrize("compare", ["pearson", "spearman", "kendall"])
def test_rounding_is_no_difference_between_distances(dissimilarity: str, compare: str) -> None:
    """A simplex, turned and shifted: all rows are equally far apart but for rounding."""
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 12)))[0]
    with pytest.raises(ValueError, match="equally far apart"):
        sosie.measure("rsa", turn + 100, arrays(12)[1], dissimilarity=dissimilarity, compare=compare)


def test_rsm_norm_difference_by_its_definition() -> None:
    x, y = arrays(15)
    a, b = ((rows @ rows.T) / np.outer(np.linalg.norm(rows, axis=1), np.linalg.norm(rows, axis=1)) for rows in (x, y))
    assert sosie.measure("rsm_norm_difference", x, y) == pytest.approx(np.linalg.norm(a - b) / 15, abs=1e-12)
