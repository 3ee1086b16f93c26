"""Eigenspace overlap, GULP and Bures by their definitions, at their limits, and against SciPy and POT."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from paired import numpy_pair
from sklearn.linear_model import Ridge

import sosie


def test_eigenspace_overlap_by_singular_vectors() -> None:
    x, y = numpy_pair()
    u, v = (np.linalg.svd(side - side.mean(0), full_matrices=False)[0] for side in (x, y))
    assert sosie.measure("eigenspace_overlap", x, y) == pytest.approx(np.sum((u.T @ v) ** 2) / 6, abs=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("widths", [(6, 4), (4, 6), (5, 5), (60, 4), (100, 4)], ids=str)
def test_eigenspace_overlap_is_cca_r2_over_the_larger_rank(widths: tuple[int, int]) -> None:
    x, y = numpy_pair(*widths)
    smaller, larger = sorted(min(width, 79) for width in widths)
    assert sosie.measure("eigenspace_overlap", x, y) == pytest.approx(
        sosie.measure("cca_r2", x, y) * smaller / larger, abs=1e-9
    )


# GULP


def scaled(rows: np.ndarray) -> np.ndarray:
    """Centred, with a total variance of 1."""
    rows = rows - rows.mean(0)
    return rows * np.sqrt(len(rows)) / np.linalg.norm(rows)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("widths", [(6, 4), (30, 5)], ids=str)
@pytest.mark.parametrize("lam", [1e-4, 0.01, 1.0])
def test_gulp_is_the_difference_of_ridge_regressions(lam: float, widths: tuple[int, int]) -> None:
    """For every target of an orthonormal basis (of mean square 1): fit both sides, compare predictions."""
    x, y = (scaled(side) for side in numpy_pair(*widths, n=20))
    targets = np.eye(20) * np.sqrt(20)
    predictions = [
        Ridge(alpha=20 * lam, fit_intercept=False, solver="svd").fit(side, targets).predict(side) for side in (x, y)
    ]
    squared = ((predictions[0] - predictions[1]) ** 2).mean(0).sum()
    assert sosie.measure("gulp", x, y, lam=lam) == pytest.approx(np.sqrt(squared), abs=1e-8)


def test_gulp_bounds_the_difference_of_predictions_for_any_target() -> None:
    x, y = (scaled(side) for side in numpy_pair())
    found = sosie.measure("gulp", x, y, lam=0.01)
    random = np.random.RandomState(0)
    for _ in range(20):
        target = random.randn(80)
        target /= np.sqrt(np.mean(target**2))
        first, second = (Ridge(alpha=0.8, fit_intercept=False).fit(side, target).predict(side) for side in (x, y))
        assert np.sqrt(np.mean((first - second) ** 2)) <= found


def test_gulp_without_a_penalty_is_mean_squared_cca() -> None:
    """The authors' identity for two widths of k: ρ = 1 − d² / 2k."""
    x, y = numpy_pair(5, 5)
    distance = sosie.measure("gulp", x, y, lam=1e-8)
    assert 1 - distance**2 / 10 == pytest.approx(sosie.measure("cca_r2", x, y), abs=1e-5)


def test_gulp_with_a_large_penalty_is_the_distance_of_gram_matrices() -> None:
    x, y = numpy_pair()
    k, l = (scaled(side) @ scaled(side).T / 80 for side in (x, y))
    distance = 1e6 * sosie.measure("gulp", x, y, lam=1e6)
    assert distance == pytest.approx(np.linalg.norm(k - l), rel=1e-5)
    # The cosine of those Gram matrices is linear CKA.
    a, b = np.linalg.norm(k), np.linalg.norm(l)
    assert (a**2 + b**2 - distance**2) / (2 * a * b) == pytest.approx(sosie.measure("linear_cka", x, y), abs=1e-5)


@pytest.mark.parametrize("lam", [0, -1, 1e-12, float("nan")])
def test_gulp_refuses_a_penalty_that_rounding_would_decide(lam: float) -> None:
    with pytest.raises(ValueError, match="at least 1e-08"):
        sosie.measure("gulp", *numpy_pair(), lam=lam)


def test_gulp_of_a_rotation_with_the_smallest_penalty_is_a_number() -> None:
    x, _ = numpy_pair(30, 4)
    rotation = np.linalg.qr(np.random.RandomState(0).randn(30, 30))[0]
    quiet = x * np.logspace(0, -6, 30)
    for lam in (1e-8, 1e-6, 1e-4):
        assert sosie.measure("gulp", quiet, quiet @ rotation, lam=lam) == pytest.approx(0, abs=3e-4)


# Bures


def bures_by_square_roots(x: np.ndarray, y: np.ndarray) -> float:
    a, b = (np.cov(side.T, bias=True) for side in (x, y))
    root = scipy.linalg.sqrtm(a)
    return float(np.sqrt(np.trace(a + b) - 2 * np.trace(scipy.linalg.sqrtm(root @ b @ root)).real))


def test_bures_against_scipy_and_pot() -> None:
    x, y = numpy_pair(5, 5)
    found = sosie.measure("bures_distance", x, y)
    assert found == pytest.approx(bures_by_square_roots(x, y), abs=1e-8)
    ot = pytest.importorskip("ot", reason="POT is not installed")
    covariances = [np.cov(side.T, bias=True) for side in (x, y)]
    distance = getattr(ot.gaussian, "bures_distance", None) or pytest.skip("this POT has no Bures distance")
    assert found == pytest.approx(float(distance(*covariances)), abs=1e-8)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bures_with_more_neurons_than_rows_is_the_distance_of_the_same_covariances() -> None:
    """Rows written out many times have the same covariance, and enough of them for the other way of computing it."""
    x, y = numpy_pair(30, 30, n=12)
    often = [np.tile(side, (5, 1)) for side in (x, y)]
    assert sosie.measure("bures_distance", x, y) == pytest.approx(sosie.measure("bures_distance", *often), abs=1e-7)


def test_bures_of_commuting_covariances() -> None:
    """Uncorrelated neurons: the distance of their standard deviations."""
    basis = np.linalg.qr(np.c_[np.ones(40), np.random.RandomState(0).randn(40, 3)])[0][:, 1:] * np.sqrt(40)
    first, second = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.5, 3.0])
    assert sosie.measure("bures_distance", basis * first, basis * second) == pytest.approx(
        np.linalg.norm(first - second), abs=1e-10
    )


def test_bures_needs_no_pairing_but_equal_widths() -> None:
    x, y = numpy_pair(5, 5)
    order = np.random.RandomState(0).permutation(80)
    assert sosie.measure("bures_distance", x[order], y) == pytest.approx(
        sosie.measure("bures_distance", x, y), abs=1e-10
    )
    assert sosie.measure("procrustes_distance", x[order], y) != pytest.approx(
        sosie.measure("procrustes_distance", x, y), abs=1e-3
    )
    with pytest.raises(ValueError, match="equal widths, got 6 and 4"):
        sosie.measure("bures_distance", *numpy_pair(6, 4))


def test_bures_after_the_best_rotation_is_raw_procrustes_at_most() -> None:
    """Covariances know less than paired rows: their distance, over all rotations, is no larger."""
    x, y = numpy_pair(5, 5)
    values = [np.sort(np.linalg.eigvalsh(np.cov(side.T, bias=True))) for side in (x, y)]
    best = np.linalg.norm(np.sqrt(values[0]) - np.sqrt(values[1]))  # both diagonal, in the same order
    assert best <= sosie.measure("bures_distance", x, y)
    assert best <= sosie.measure("raw_procrustes_distance", x, y) / np.sqrt(80)
