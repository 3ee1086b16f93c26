"""Groups and maps of networks of which only distances are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from sosie.shapes import medoids, spherical_mds

Array = NDArray[np.float64]


def on_sphere(count: int, dimensions: int, seed: int = 0) -> tuple[Array, Array]:
    points = np.random.default_rng(seed).normal(size=(count, dimensions + 1))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return points, np.arccos((points @ points.T).clip(-1, 1)) * (1 - np.eye(count))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_points_on_a_sphere_are_found_again(dimensions: int) -> None:
    truth, angles = on_sphere(12, dimensions)
    points, stress = spherical_mds(angles, dimensions)
    assert stress < 1e-6
    assert points @ points.T == pytest.approx(truth @ truth.T, abs=1e-6)


def test_angles_that_fit_no_sphere_are_fitted_better_than_by_eigenvectors() -> None:
    _, angles = on_sphere(15, 6)
    points, stress = spherical_mds(angles, 2)
    values, vectors = np.linalg.eigh(np.cos(angles))
    start = vectors[:, -3:] * np.sqrt(values[-3:])
    start /= np.linalg.norm(start, axis=1, keepdims=True)
    shown = np.arccos((start @ start.T).clip(-1, 1))
    assert np.linalg.norm(points, axis=1) == pytest.approx(np.ones(15))
    assert 0 < stress < np.linalg.norm(shown - angles) / np.linalg.norm(angles)
    assert stress > spherical_mds(angles, 4)[1] > spherical_mds(angles, 6)[1]


def test_equal_items_and_few_of_them() -> None:
    points, stress = spherical_mds(np.zeros((3, 3)))
    assert stress == 0
    assert np.ptp(points, axis=0).max() < 1e-8
    points, stress = spherical_mds([[0, 1.2], [1.2, 0]], 3)
    assert points.shape == (2, 4)
    assert np.arccos(points[0] @ points[1]) == pytest.approx(1.2, abs=1e-6)


def test_medoids_have_the_least_sum_of_distances() -> None:
    best = 0
    for seed in range(10):
        places = np.random.default_rng(seed).normal(size=(11, 2))
        far = np.linalg.norm(places[:, None] - places[None], axis=2)
        labels, centres = medoids(far, 3)
        assert labels[centres].tolist() == [0, 1, 2]
        assert labels[0] == 0
        assert far[np.arange(11), centres[labels]] == pytest.approx(far[:, centres].min(1))
        least = min(far[:, list(three)].min(1).sum() for three in itertools.combinations(range(11), 3))
        found = far[:, centres].min(1).sum()
        assert found < 1.05 * least
        best += found < least + 1e-9
    assert best >= 8


def test_medoids_of_equal_items() -> None:
    labels, centres = medoids(np.zeros((4, 4)), 3)
    assert set(labels) == {0, 1, 2}
    assert len(set(centres)) == 3
    assert medoids([[0, 1, 9], [1, 0, 9], [9, 9, 0]], 1)[1].tolist() == [0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0.0]], r"at least two networks, \(N, N\), got \(1, 1\)"),
        (np.zeros((2, 3)), r"got \(2, 3\)"),
        ([[0, np.nan], [np.nan, 0]], "2 distances are NaN or infinite"),
        ([[0, 1.0], [2.0, 0]], "symmetric"),
        ([[1, 0.5], [0.5, 1]], "are these similarities"),
    ],
)
def test_bad_distances_are_named(given: Array, message: str) -> None:
    for call in (spherical_mds, lambda each: medoids(each, 1)):
        with pytest.raises(ValueError, match=message):
            call(given)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="angles go from 0 to π, got 4"):
        spherical_mds([[0, 4.0], [4.0, 0]])
    with pytest.raises(ValueError, match="groups must be a whole number from 1 to 2, got 3"):
        medoids([[0, 1.0], [1.0, 0]], 3)


def test_no_points_near_those_found_are_better() -> None:
    _, angles = on_sphere(10, 5)
    points, stress = spherical_mds(angles, 2)
    random = np.random.default_rng(1)
    for _ in range(30):
        near = points + 1e-3 * random.normal(size=points.shape)
        near /= np.linalg.norm(near, axis=1, keepdims=True)
        shown = np.arccos((near @ near.T).clip(-1, 1)) * (1 - np.eye(10))
        assert np.linalg.norm(shown - angles) / np.linalg.norm(angles) > stress
