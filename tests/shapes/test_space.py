"""Shape space: means, geodesics, tangent components and k-means against closed forms and the measures themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import sosie
from sosie.shapes import geodesic, kmeans, mean_shape, tangent_pca

Array = NDArray[np.float64]
both = pytest.mark.parametrize("scale", [True, False], ids=["scaled", "raw"])


def rotation(p: int, seed: int) -> Array:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(p, p)))[0]


def networks(count: int = 6, n: int = 30, p: int = 5, seed: int = 0, noise: float = 0.4) -> list[Array]:
    """Noisy copies of one network, each rotated, shifted and of another width."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, p)) * np.linspace(2, 0.5, p)
    found = []
    for k in range(count):
        wide = np.pad(x + noise * random.normal(size=x.shape), ((0, 0), (0, k % 3)))
        found.append(wide @ rotation(wide.shape[1], k) + random.normal(size=wide.shape[1]))
    return found


def distance(x: Array, y: Array, scale: bool) -> float:
    return sosie.measure("procrustes_angle" if scale else "raw_procrustes_distance", x, y)


def unit(x: Array, scale: bool) -> Array:
    x = x - x.mean(0)
    return x / np.linalg.norm(x) if scale else x


@both
def test_the_mean_of_one_network_in_many_coordinates_is_that_network(scale: bool) -> None:
    found = mean_shape(networks(noise=0), scale=scale)
    assert distance(found.shape, networks(noise=0)[0], scale) < 1e-7
    assert found.distances == pytest.approx(np.zeros(6), abs=1e-7)
    assert np.ptp(found.aligned, axis=0).max() < 1e-7
    assert found.variance < 1e-14


@both
def test_distances_from_the_mean_are_those_of_the_measure(scale: bool) -> None:
    given = networks()
    found = mean_shape(given, scale=scale)
    assert found.distances == pytest.approx([distance(found.shape, x, scale) for x in given], rel=1e-9)
    assert found.variance == pytest.approx(np.mean(found.distances**2))
    for x, turned in zip(given, found.aligned, strict=True):
        assert distance(unit(x, scale), turned, scale) < 1e-6
    assert np.linalg.norm(found.shape) == pytest.approx(1, abs=1e-12) or not scale


@both
def test_no_point_near_the_mean_is_better(scale: bool) -> None:
    given = networks()
    found = mean_shape(given, scale=scale)
    random = np.random.default_rng(3)
    for _ in range(30):
        step = random.normal(size=found.shape.shape)
        moved = unit(found.shape + 0.02 * np.linalg.norm(found.shape) * unit(step, True), scale)
        assert np.mean([distance(moved, x, scale) ** 2 for x in given]) > found.variance


@both
def test_the_mean_does_not_depend_on_coordinates_or_order(scale: bool) -> None:
    given = networks()
    turned = [x @ rotation(x.shape[1], 40 + k) + 3 for k, x in enumerate(given)][::-1]
    a, b = mean_shape(given, scale=scale), mean_shape(turned, scale=scale)
    assert distance(a.shape, b.shape, scale) < 1e-7 * np.linalg.norm(a.shape)
    assert b.distances[::-1] == pytest.approx(a.distances, rel=1e-8)


def raw_mean_from(start: Array, given: list[Array]) -> float:
    """The variance about the mean that generalised Procrustes analysis finds from this start."""
    mean, before = start, np.inf
    while True:
        pairs = [(x, np.linalg.svd(x.T @ mean)) for x in given]
        aligned = [x @ u @ v for x, (u, _, v) in pairs]
        variance = float(np.mean([np.linalg.norm(x - mean) ** 2 for x in aligned]))
        if variance > before * (1 - 1e-12):
            return variance
        mean, before = np.mean(aligned, 0), variance


@pytest.mark.parametrize(("noise", "several"), [(0.4, False), (100, True)], ids=["related", "unrelated"])
def test_only_unrelated_networks_have_several_local_means(noise: float, several: bool) -> None:
    worse = []
    for seed in range(3):
        given = [x - x.mean(0) for x in networks(6, p=3, seed=seed, noise=noise)]
        width = max(x.shape[1] for x in given)
        given = [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in given]
        found = mean_shape(given, scale=False).variance
        worse += [found / raw_mean_from(start, given) - 1 for start in given]
    assert (max(np.abs(worse)) > 1e-4) == several
    assert max(worse) < 0.1


@both
def test_the_mean_of_two_is_halfway_between_them(scale: bool) -> None:
    x, y = networks(2)
    assert distance(mean_shape([x, y], scale=scale).shape, geodesic(x, y, scale=scale), scale) < 1e-7


def test_the_mean_of_networks_with_one_neuron_is_their_mean_up_to_signs() -> None:
    """In one dimension rotations are signs, so means are those of numbers; scaled, of points on a circle."""
    x = np.random.default_rng(0).normal(size=(20, 1))
    x -= x.mean()
    given = [x * size for size in (1.0, -2.0, 4.5)]
    found = mean_shape(given, scale=False)
    assert np.abs(found.shape) == pytest.approx(np.abs(2.5 * x), abs=1e-9)
    across = np.random.default_rng(1).normal(size=(20, 1))
    across -= across.mean()
    across -= x * (x * across).sum() / (x * x).sum()
    x, across = x / np.linalg.norm(x), across / np.linalg.norm(across)
    angles = np.array([0.1, 0.3, -0.25, 0.05])
    found = mean_shape([np.cos(t) * x + np.sin(t) * across for t in angles])
    expected = np.cos(0.05) * x + np.sin(0.05) * across
    assert abs((found.shape * expected).sum()) == pytest.approx(1, abs=1e-12)
    assert found.distances == pytest.approx(np.abs(angles - 0.05), abs=1e-9)


def test_the_mean_of_wide_networks_is_the_barycentre_of_their_gram_matrices() -> None:
    """With at least as many neurons as rows, Procrustes is the Bures distance of K = XXᵀ, whose barycentre K fulfils
    K = mean (K^½ Kᵢ K^½)^½ (Agueh and Carlier 2011)."""
    random = np.random.default_rng(0)
    given = [random.normal(size=(8, 12)) for _ in range(4)]
    mean = mean_shape(given, scale=False).shape
    assert mean.shape == (8, 8)

    def root(matrix: Array) -> Array:
        values, vectors = np.linalg.eigh(matrix)
        return (vectors * np.sqrt(values.clip(0))) @ vectors.T

    half = root(mean @ mean.T)
    grams = [(x - x.mean(0)) @ (x - x.mean(0)).T for x in given]
    assert np.mean([root(half @ k @ half) for k in grams], axis=0) == pytest.approx(mean @ mean.T, abs=1e-7)


@both
def test_a_geodesic_leads_from_one_to_the_other_at_even_speed(scale: bool) -> None:
    x, y = networks(3)[1:]
    at = [0.0, 0.25, 0.6, 1.0]
    path = geodesic(x, y, at, scale=scale)
    length = distance(x, y, scale)
    assert path.shape == (4, 30, 7)
    assert path[0] == pytest.approx(np.pad(unit(x, scale), ((0, 0), (0, 1))), abs=1e-12)
    assert distance(path[-1], unit(y, scale), scale) < 1e-6
    for i, s in enumerate(at):
        for j, t in enumerate(at):
            assert distance(path[i], path[j], scale) == pytest.approx(abs(s - t) * length, abs=1e-6)
    assert geodesic(x, y, scale=scale) == pytest.approx(geodesic(x, y, [0.5], scale=scale)[0])


@both
def test_networks_on_a_geodesic_have_one_tangent_component(scale: bool) -> None:
    x, y = networks(2)
    at = np.array([0.0, 0.1, 0.5, 0.7, 1.0])
    coordinates, shares, directions = tangent_pca(list(geodesic(x, y, list(at), scale=scale)), 2, scale=scale)
    assert shares == pytest.approx([1, 0], abs=1e-9)
    line = (at - at.mean()) * distance(x, y, scale)
    line = line * np.sign(line[np.abs(line).argmax()])
    assert coordinates[:, 0] == pytest.approx(line, abs=1e-7)
    assert np.linalg.norm(directions[0]) == pytest.approx(1)


@both
def test_tangent_components_keep_distances_from_the_mean(scale: bool) -> None:
    given = networks()
    coordinates, shares, directions = tangent_pca(given, 5, scale=scale)
    assert np.linalg.norm(coordinates, axis=1) == pytest.approx(mean_shape(given, scale=scale).distances, rel=1e-6)
    assert shares.sum() == pytest.approx(1)
    assert shares == pytest.approx(np.square(coordinates).sum(0) / np.square(coordinates).sum())
    inner = np.einsum("anp,bnp->ab", directions, directions)
    assert inner == pytest.approx(np.eye(5), abs=1e-9)


@both
def test_k_means_finds_groups_that_are_there(scale: bool) -> None:
    truth = [0, 1, 1, 2, 0, 2, 1, 0]
    random = np.random.default_rng(0)
    centres = random.normal(size=(3, 25, 4))
    given = [(centres[k] + 0.1 * random.normal(size=(25, 4))) @ rotation(4, number) for number, k in enumerate(truth)]
    labels, means, total = kmeans(given, 3, scale=scale)
    assert labels.tolist() == truth
    of_group = [
        mean_shape([x for x, k in zip(given, truth, strict=True) if k == group], scale=scale) for group in range(3)
    ]
    for mean, own in zip(means, of_group, strict=True):
        assert distance(mean, own.shape, scale) < 1e-7 * np.linalg.norm(mean)
    assert total == pytest.approx(sum(np.square(own.distances).sum() for own in of_group))
    assert kmeans(given, 1, scale=scale)[2] == pytest.approx(8 * mean_shape(given, scale=scale).variance)
    assert kmeans(given, 8, scale=scale)[0].tolist() == list(range(8))


def test_k_means_of_equal_networks_has_no_empty_group() -> None:
    given = networks(noise=0, count=4)
    labels, means, total = kmeans(given, 3)
    assert set(labels) == {0, 1, 2}
    assert len(means) == 3
    assert total < 1e-12


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_any_scale_of_the_rows(size: float) -> None:
    given = networks()
    found = mean_shape([size * x for x in given])
    assert found.distances == pytest.approx(mean_shape(given).distances, rel=1e-8)
    with pytest.raises(ValueError, match="the largest number in network 0 is"):
        mean_shape([size * x for x in given], scale=False)
    assert repr(found).startswith("<MeanShape of 6 networks: 30 stimuli, 7 columns, variance 0.")


def test_torch_and_other_numbers_are_taken() -> None:
    given = networks()
    found = mean_shape([torch.from_numpy(x).float() for x in given])
    assert found.distances == pytest.approx(mean_shape(given).distances, rel=1e-4)
    assert mean_shape(np.stack([given[0], given[3]])).steps >= 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([np.eye(4)], "at least two networks, got 1"),
        ([np.eye(4), np.eye(5)], r"the same stimuli.*\(4, 4\), \(5, 5\)"),
        ([np.eye(4), np.ones((4, 2))], "network 1 does not vary: all 4 rows are equal"),
        ([np.eye(4), np.ones(4)], r"network 1 must be \(n, p\).*\(4,\)"),
        ([np.eye(4), np.full((4, 4), np.nan)], "network 1 has values that are complex, NaN or infinite"),
    ],
)
def test_bad_networks_are_named(given: list[Array], message: str) -> None:
    for call in (mean_shape, tangent_pca, lambda each: kmeans(each, 1)):
        with pytest.raises(ValueError, match=message):
            call(given)


def test_bad_options_are_named() -> None:
    given = networks(3)
    with pytest.raises(ValueError, match="components must be a whole number from 1 to 2, got 3"):
        tangent_pca(given, 3)
    with pytest.raises(ValueError, match="groups must be a whole number from 1 to 3, got 4: there are 3 networks"):
        kmeans(given, 4)
    with pytest.raises(ValueError, match="at goes from 0"):
        geodesic(*given[:2], at=1.5)
