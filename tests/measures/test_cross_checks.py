"""Canonical correlations against cca-zoo and scikit-learn, on several shapes."""

from __future__ import annotations

import numpy as np
import pytest
from paired import correlated_rows
from sklearn.cross_decomposition import CCA as SklearnCCA
from sklearn.decomposition import PCA

import sosie

SHAPES = [(80, 6, 4), (200, 10, 10), (60, 3, 12)]


def rows(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    n, p, q = shape
    x, y = correlated_rows(n=n, p=p, q=q, seed=p)
    return x.numpy(), y.numpy()


def by_cca_zoo(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    linear = pytest.importorskip("cca_zoo.linear", reason="cca-zoo is not installed")
    model = linear.CCA(n_components=min(x.shape[1], y.shape[1])).fit([x, y])
    u, v = model.transform([x, y])
    return np.array([np.corrcoef(u[:, i], v[:, i])[0, 1] for i in range(u.shape[1])])


def by_scikit_learn(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    count = min(x.shape[1], y.shape[1])
    u, v = SklearnCCA(n_components=count, scale=True, max_iter=20000, tol=1e-14).fit_transform(x, y)
    return np.array([abs(np.corrcoef(u[:, i], v[:, i])[0, 1]) for i in range(count)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("peer", "tolerance"), [(by_cca_zoo, 1e-8), (by_scikit_learn, 1e-5)])
def test_canonical_correlations(peer, tolerance: float, shape: tuple[int, int, int]) -> None:
    x, y = rows(shape)
    found = np.abs(peer(x, y))
    assert sosie.measure("mean_cca", x, y) == pytest.approx(found.mean(), abs=tolerance)
    assert sosie.measure("cca_r2", x, y) == pytest.approx(np.mean(found**2), abs=tolerance)


@pytest.mark.parametrize("keep", [0.8, 0.95])
@pytest.mark.parametrize(("peer", "tolerance"), [(by_cca_zoo, 1e-8), (by_scikit_learn, 1e-5)])
def test_svcca_is_cca_after_scikit_learns_pca(peer, tolerance: float, keep: float) -> None:
    x, y = rows((200, 10, 10))
    leading = [PCA(n_components=keep).fit_transform(side) for side in (x, y)]
    assert min(side.shape[1] for side in leading) < 10
    assert sosie.measure("svcca", x, y, keep=keep) == pytest.approx(np.abs(peer(*leading)).mean(), abs=tolerance)
