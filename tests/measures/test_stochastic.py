"""Measures of noisy responses: their laws both ways, closed forms, and dissimilarities that are right on average."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.covariance import ledoit_wolf
from test_laws import transformed
from torch import Tensor

import sosie
from sosie.measures import MEASURES, Measure, crossnobis, noise_mahalanobis, stochastic
from sosie.measures.define import TRANSFORMATIONS

Array = NDArray[np.float64]
OF_REPETITIONS = [measure for measure in MEASURES.values() if measure.reads_repetitions]
measures = pytest.mark.parametrize("measure", OF_REPETITIONS, ids=lambda m: m.name)
distances = pytest.mark.parametrize("name", ["gaussian_shape_distance", "energy_shape_distance"])


def responses(n: int = 12, r: int = 9, p: int = 4, q: int = 3, s: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Responses of two sides that have something in common, with noise that depends on the stimulus."""
    random = torch.Generator().manual_seed(seed)
    shared = torch.randn(n, 3, generator=random, dtype=torch.float64)

    def side(width: int, repeats: int) -> Tensor:
        mix = torch.randn(3, width, generator=random, dtype=torch.float64)
        own = torch.randn(n, width, width, generator=random, dtype=torch.float64) / width**0.5
        noise = torch.randn(n, repeats, width, generator=random, dtype=torch.float64)
        return (shared @ mix)[:, None] + 0.7 * noise @ own + torch.linspace(-1, 2, width, dtype=torch.float64)

    return side(p, r), side(q, s)


def turned(rows: Tensor, how: str) -> Tensor:
    return transformed(rows.flatten(0, 1), how).reshape(rows.shape)


def rotation(p: int, seed: int) -> Array:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(p, p)))[0]


def check_invariance(measure: Measure, x: Tensor, y: Tensor, how: str) -> None:
    before = float(measure.of(x, y))
    after = [float(measure.of(turned(x, how), y)), float(measure.of(x, turned(y, how)))]
    moved = max(abs(value - before) for value in after)
    if how in measure.invariant:
        assert moved < 1e-8, f"{measure.name} under {how} moved by {moved}"
    else:
        assert moved > 1e-4, f"{measure.name} under {how} did not move, but does not declare that"


def check_symmetry(measure: Measure, x: Tensor, y: Tensor) -> None:
    gap = abs(float(measure.of(x, y)) - float(measure.of(y, x)))
    assert (gap < 1e-9) == measure.symmetric, f"{measure.name} differs by {gap} when sides are swapped"


# Laws, both ways


@measures
def test_invariant_exactly_where_declared(measure: Measure) -> None:
    for how in TRANSFORMATIONS:
        check_invariance(measure, *responses(), how)


@measures
def test_symmetric_exactly_where_declared(measure: Measure) -> None:
    for seed in range(3):
        check_symmetry(measure, *responses(seed=seed))


@measures
def test_responses_with_themselves_and_bounds(measure: Measure) -> None:
    x, y = responses()
    assert float(measure.of(x, x.clone())) == pytest.approx(measure.same, abs=1e-6)
    low, high = measure.bounds
    for seed in range(5):
        value = float(measure.of(*responses(seed=seed)))
        assert value >= low
        assert high is None or value <= high
    near, far = measure.of(x, turned(x, "rotation") + 0.01), measure.of(x, y)
    assert (near > far) if measure.closer == "up" else (near < far)


@measures
def test_stimuli_are_paired_and_repetitions_are_not(measure: Measure) -> None:
    x, y = responses()
    value = float(measure.of(x, y))
    assert abs(float(measure.of(x, y.flip(0))) - value) > 1e-3
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert float(measure.of(x[order], y[order])) == pytest.approx(value, abs=1e-9)
    assert float(measure.of(x, y.flip(1))) == pytest.approx(value, abs=1e-9)


@measures
def test_float32_is_near_float64(measure: Measure) -> None:
    x, y = responses()
    assert float(measure.of(x.float(), y.float())) == pytest.approx(float(measure.of(x, y)), abs=1e-5)
    assert measure.facts()["paper"]
    assert measure.facts()["cost"]


@distances
def test_triangle_inequality(name: str) -> None:
    for seed in range(12):
        a, b = responses(n=4, p=3, q=3, r=5, s=5, seed=seed)
        c = responses(n=4, p=3, r=5, seed=100 + seed)[0]
        sides = sorted(sosie.measure(name, *pair) for pair in itertools.combinations((a, b, c), 2))
        assert sides[2] <= sides[0] + sides[1] + 1e-9


def test_the_laws_can_fail() -> None:
    x, y = responses()
    with pytest.raises(AssertionError, match="under scale moved"):
        check_invariance(replace(MEASURES["gaussian_shape_distance"], invariant=frozenset({"scale"})), x, y, "scale")
    with pytest.raises(AssertionError, match="did not move"):
        check_invariance(replace(MEASURES["crossnobis_rsa"], invariant=frozenset()), x, y, "rotation")
    with pytest.raises(AssertionError, match="sides are swapped"):
        check_symmetry(replace(MEASURES["crossnobis_rsa"], symmetric=False), x, y)


# Closed forms


def covariances(n: int, p: int, seed: int) -> Array:
    factors = np.random.default_rng(seed).normal(size=(n, p, p))
    return factors @ factors.transpose(0, 2, 1)


def squared_bures(a: Array, b: Array) -> float:
    """tr A + tr B − 2 tr (A B)^½: the eigenvalues of A B are those of A^½ B A^½."""
    return float(np.trace(a) + np.trace(b) - 2 * np.sqrt(np.linalg.eigvals(a @ b).real.clip(0)).sum())


def test_without_noise_it_is_the_procrustes_distance() -> None:
    x, y = (side.mean(1).numpy() for side in responses())
    raw = sosie.measure("raw_procrustes_distance", x, y) / 12**0.5
    still = [(side, np.zeros((12, side.shape[1], side.shape[1]))) for side in (x, y)]
    for alpha in (0.5, 1.0, 2.0):
        found = sosie.measure("gaussian_shape_distance", *still, alpha=alpha)
        assert found == pytest.approx(alpha**0.5 * raw, abs=1e-9)
    assert sosie.measure("gaussian_shape_distance", *still, alpha=0.0) == 0
    same = [np.repeat(side[:, None], 3, axis=1) for side in (x, y)]
    assert sosie.measure("gaussian_shape_distance", *same) == pytest.approx(raw, abs=1e-9)


def test_means_alone_are_the_procrustes_distance() -> None:
    x, y = responses()
    raw = sosie.measure("raw_procrustes_distance", x.mean(1), y.mean(1)) / 12**0.5
    assert sosie.measure("gaussian_shape_distance", x, y, alpha=2.0) == pytest.approx(2**0.5 * raw, abs=1e-9)
    assert sosie.measure("energy_shape_distance", x, y, q=2.0) == pytest.approx(raw, abs=1e-9)


@pytest.mark.parametrize("p", [2, 5, 9])
def test_one_stimulus_is_the_bures_distance_of_sorted_spectra(p: int) -> None:
    """With one stimulus the best rotation brings the principal axes together, in the order of their variances."""
    a, b = covariances(1, p, 0), covariances(1, p + 1, 1)
    shift = np.zeros((1, p)), np.ones((1, p + 1))
    roots = [np.sqrt(np.linalg.eigvalsh(each[0]).clip(0))[::-1] for each in (a, b)]
    expected = np.linalg.norm(np.pad(roots[0], (0, 1)) - roots[1])
    assert sosie.measure("gaussian_shape_distance", (shift[0], a), (shift[1], b)) == pytest.approx(expected, rel=1e-9)


def test_in_one_dimension_it_is_a_sum_over_stimuli() -> None:
    """Rotations are signs there; the Bures distance is that of standard deviations."""
    random = np.random.default_rng(0)
    (mx, my), (sx, sy) = random.normal(size=(2, 8, 1)), random.uniform(0.1, 2, size=(2, 8, 1))
    mx, my = mx - mx.mean(), my - my.mean()
    for alpha in (0.0, 0.7, 1.0):
        by_sign = [np.mean(alpha * (mx - sign * my) ** 2 + (2 - alpha) * (sx - sy) ** 2) for sign in (1, -1)]
        found = sosie.measure(
            "gaussian_shape_distance", (mx, sx[..., None] ** 2), (my, sy[..., None] ** 2), alpha=alpha
        )
        assert found == pytest.approx(min(by_sign) ** 0.5, abs=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.7])
def test_no_rotation_of_the_plane_is_better(alpha: float) -> None:
    random = np.random.default_rng(1)
    means, noise = random.normal(size=(2, 5, 2)), [covariances(5, 2, seed) for seed in (2, 3)]
    means = means - means.mean(1, keepdims=True)
    best = np.inf
    for angle in np.linspace(0, 2 * np.pi, 4001):
        for mirror in (1, -1):
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * [1, mirror]
            apart = np.square(means[0] - means[1] @ turn.T).sum(1)
            bures = [squared_bures(a, turn @ b @ turn.T) for a, b in zip(*noise, strict=True)]
            best = min(best, float(np.mean(alpha * apart + (2 - alpha) * np.array(bures))))
    found = sosie.measure("gaussian_shape_distance", (means[0], noise[0]), (means[1], noise[1]), alpha=alpha)
    assert found == pytest.approx(best**0.5, abs=1e-5)
    assert found <= best**0.5 + 1e-9


@pytest.mark.parametrize("q", [0.5, 1.0, 1.5])
def test_energy_against_a_search_over_the_plane(q: float) -> None:
    x, y = (side.numpy() - side.numpy().mean((0, 1)) for side in responses(n=4, p=2, q=2, r=5, s=4))

    def mean_power(a: Array, b: Array) -> float:
        return float((np.linalg.norm(a[:, :, None] - b[:, None], axis=3) ** q).mean())

    best = np.inf
    for angle in np.linspace(0, 2 * np.pi, 4001):
        for mirror in (1, -1):
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * [1, mirror]
            best = min(best, mean_power(x, y @ turn.T))
    expected = (best - mean_power(x, x) / 2 - mean_power(y, y) / 2) ** 0.5
    found = sosie.measure("energy_shape_distance", x, y, q=q)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found <= expected + 1e-9


@distances
def test_rotations_are_found_again(name: str) -> None:
    x = responses(n=20, p=6)[0].numpy()
    y = x @ rotation(6, 1) + 2
    assert sosie.measure(name, x, y) < 1e-6
    few = responses(n=3, p=6, r=15)[0].numpy()  # the means of three stimuli do not determine the rotation
    assert sosie.measure(name, few, few @ rotation(6, 2)) < 1e-6
    wide = np.pad(x, ((0, 0), (0, 0), (0, 3))) @ rotation(9, 3)
    assert sosie.measure(name, x, wide) < 1e-6


def test_more_starts_find_better_rotations_where_noise_alone_decides() -> None:
    found = []
    for seed in range(8):
        x, y = responses(n=3, p=4, q=4, r=4, s=4, seed=seed)
        values = [sosie.measure("gaussian_shape_distance", x, y, alpha=0.0, starts=starts) for starts in (0, 6)]
        assert values[1] <= values[0] + 1e-9
        found.append(values[1] < 0.99 * values[0])
    assert any(found)


def test_means_and_covariances_are_those_of_the_repetitions() -> None:
    x, y = (side.numpy() for side in responses())
    given = [(side.mean(1), np.stack([np.cov(each.T) for each in side])) for side in (x, y)]
    for name in ("gaussian_shape_distance", "noise_mahalanobis_rsa"):
        options = {"shrinkage": 0.0} if name.startswith("noise") else {}
        assert sosie.measure(name, *given, **options) == pytest.approx(sosie.measure(name, x, y, **options), abs=1e-9)
    assert sosie.measure("gaussian_shape_distance", x, given[1]) == pytest.approx(
        sosie.measure("gaussian_shape_distance", x, y), abs=1e-9
    )


def test_energy_sees_what_means_and_covariances_do_not() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 400, 1))
    y = np.sign(random.normal(size=(3, 400, 1)))
    x, y = ((side - side.mean(1, keepdims=True)) / side.std(1, keepdims=True) for side in (x, y))
    assert sosie.measure("gaussian_shape_distance", x, y) < 1e-6
    assert sosie.measure("energy_shape_distance", x, y) > 0.2


# Dissimilarities in units of the noise


def simulated(n: int, r: int, p: int, draws: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Means of which the first two are equal, the covariance of the noise, and draws (draws, n, r, p)."""
    random = np.random.default_rng(seed)
    means = random.normal(size=(n, p))
    means[1] = means[0]
    covariance = covariances(1, p, seed)[0] / p + 0.2 * np.eye(p)
    noise = random.normal(size=(draws, n, r, p)) @ np.linalg.cholesky(covariance).T
    return means, covariance, means[None, :, None] + noise


def test_crossnobis_is_right_on_average() -> None:
    means, covariance, draws = simulated(5, 3, 4, 3000)
    found = np.stack([crossnobis(each, noise=covariance) for each in draws])
    apart = means[:, None] - means[None]
    truth = np.einsum("abp,pq,abq->ab", apart, np.linalg.inv(covariance), apart) / 4
    error = found.std(0) / len(found) ** 0.5
    assert truth[0, 1] == 0
    assert np.all(np.abs(found.mean(0) - truth) <= 4 * error)
    assert (found[:, 0, 1] < 0).mean() > 0.3
    plain = np.stack([noise_mahalanobis(each, noise=covariance) for each in draws])
    assert np.all(np.abs(plain.mean(0) - truth - 2 / 3 * (1 - np.eye(5))) <= 4 * plain.std(0) / len(plain) ** 0.5)


def test_the_stated_bias_of_noise_that_is_estimated_from_the_same_rows() -> None:
    n, r, p = 6, 3, 4
    _, _, draws = simulated(n, r, p, 3000)
    draws = draws - draws.mean((0, 2), keepdims=True)  # all stimuli equal
    found = np.stack([crossnobis(each, shrinkage=0.0) for each in draws])[:, *np.triu_indices(n, 1)].mean(1)
    free = n * (r - 1)
    assert found.mean() == pytest.approx(2 * (p + 1) / (r * (free - p - 1)), abs=4 * found.std() / 3000**0.5)


def test_crossnobis_is_the_mean_over_folds() -> None:
    """As rsatoolbox computes it: one repetition against the mean of the others, each in turn."""
    rows = responses(n=6, r=4)[0].numpy()
    covariance = covariances(1, 4, 0)[0]
    inverse = np.linalg.inv(covariance)
    expected = np.zeros((6, 6))
    for fold in range(4):
        one, others = rows[:, fold], np.delete(rows, fold, axis=1).mean(1)
        a, b = (each[:, None] - each[None] for each in (one, others))
        expected += np.einsum("abp,pq,abq->ab", a, inverse, b) / 4 / 4
    assert crossnobis(rows, noise=covariance) == pytest.approx(expected, abs=1e-10)
    assert crossnobis(torch.from_numpy(rows), noise=covariance).numpy() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("p", [4, 60])
def test_the_noise_is_shrunk_as_scikit_learn_does(p: int) -> None:
    rows = responses(n=6, r=5, p=p)[0].numpy()
    residuals = (rows - rows.mean(1, keepdims=True)).reshape(-1, p)
    noise = ledoit_wolf(residuals, assume_centered=True)[0] * 5 / 4
    assert crossnobis(rows) == pytest.approx(crossnobis(rows, noise=noise), rel=1e-8, abs=1e-9)
    assert noise_mahalanobis(rows) == pytest.approx(noise_mahalanobis(rows, noise=noise), rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("name", ["crossnobis", "noise_mahalanobis"])
def test_rsa_of_dissimilarities(name: str) -> None:
    x, y = (side.numpy() for side in responses())
    a, b = ({"crossnobis": crossnobis, "noise_mahalanobis": noise_mahalanobis}[name](side) for side in (x, y))
    upper = np.triu_indices(12, 1)
    a, b = a[upper], b[upper]
    assert sosie.measure(f"{name}_rsa", x, y) == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert sosie.measure(f"{name}_rsa", x, y, compare="pearson") == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert -1 <= sosie.measure(f"{name}_rsa", x, y, compare="kendall") <= 1


def test_crossnobis_of_unrelated_networks_is_near_zero() -> None:
    random = np.random.default_rng(0)
    shared = random.normal(size=(30, 5))
    values, plain = [], []
    for _ in range(20):
        x, y = (random.normal(size=(30, 4, 5)) for _ in range(2))
        values.append(sosie.measure("crossnobis_rsa", x, y))
        plain.append(sosie.measure("noise_mahalanobis_rsa", x, y))
    assert abs(np.mean(values)) < 0.03
    assert np.mean(plain) > 0.5
    x, y = (shared[:, None] + random.normal(size=(30, 4, 5)) for _ in range(2))
    assert sosie.measure("crossnobis_rsa", x, y) > 0.8


# Bad input


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 3)), r"x must be \(n, repeats, p\).*got \(4, 3\)"),
        (np.zeros((4, 1, 3)), r"one repetition of each stimulus, shape \(4, 1, 3\): a covariance needs two"),
        (np.zeros((5, 2, 3)), "the same stimuli, got 5 and 4"),
        ((np.zeros((4, 3)), np.zeros((4, 2, 2))), r"got \(4, 3\) and \(4, 2, 2\)"),
        ((np.zeros((4, 3)), -np.ones((4, 3, 3))), "covariances must be symmetric, without eigenvalues below 0"),
        (np.full((4, 2, 3), np.nan), "24 values that are NaN or infinite"),
        (np.full((4, 2, 3), 1e-200), "largest number in x is 1e-200"),
        ([np.zeros((2, 3)), np.zeros((1, 3))], "x must be an array, but its parts have different shapes"),
    ],
)
def test_bad_responses_are_named(x: Array, message: str) -> None:
    y = np.random.default_rng(0).normal(size=(4, 2, 3))
    with pytest.raises(ValueError, match=message):
        sosie.measure("gaussian_shape_distance", x, y)


def test_bad_options_are_named() -> None:
    x, y = responses()
    given = [(side.mean(1), torch.eye(side.shape[2]).expand(12, -1, -1)) for side in (x, y)]
    for name in ("energy_shape_distance", "crossnobis_rsa"):
        with pytest.raises(ValueError, match="needs the repetitions themselves"):
            sosie.measure(name, *given)
    with pytest.raises(ValueError, match="alpha=3"):
        sosie.measure("gaussian_shape_distance", x, y, alpha=3)
    with pytest.raises(ValueError, match="power q above 0"):
        sosie.measure("energy_shape_distance", x, y, q=0)
    with pytest.raises(ValueError, match="at least 3 stimuli, got 2"):
        sosie.measure("crossnobis_rsa", x[:2], y[:2])
    with pytest.raises(ValueError, match="compare must be one of"):
        sosie.measure("crossnobis_rsa", x, y, compare="nothing")
    with pytest.raises(ValueError, match="shrinkage is a share"):
        sosie.measure("crossnobis_rsa", x, y, shrinkage=2)
    wide = np.random.default_rng(0).normal(size=(4, 2, 6))
    with pytest.raises(ValueError, match="noise is singular: it has 4 of the 6 directions"):
        crossnobis(wide, shrinkage=0.0)
    with pytest.raises(ValueError, match=r"covariance \(p, p\), got \(3, 3\)"):
        crossnobis(x, noise=np.eye(3))
    with pytest.raises(ValueError, match="not both"):
        crossnobis(x, noise=np.eye(4), shrinkage=0.1)
    with pytest.raises(ValueError, match=r"repeated responses \(n, repeats, p\); use sosie.measure"):
        sosie.compare({"a": x.mean(1).numpy()}, {"a": y.mean(1).numpy()}, measures="crossnobis_rsa")


def test_responses_without_noise_have_no_distance_from_themselves() -> None:
    x = np.repeat(np.random.default_rng(0).normal(size=(6, 1, 4)), 3, 1)
    assert sosie.measure("energy_shape_distance", x, x) == pytest.approx(0, abs=1e-7)
    assert sosie.measure("energy_shape_distance", np.ones((6, 3, 4)), np.zeros((6, 3, 4))) == 0


def test_noise_from_elsewhere() -> None:
    x, _ = responses()
    p = x.shape[2]
    assert noise_mahalanobis(x[:, :1], noise=np.eye(p)).shape == (len(x), len(x)), "one response each is enough"
    with pytest.raises(ValueError, match=r"at least 2 of each stimulus, got \(12, 1"):
        crossnobis(x[:, :1], noise=np.eye(p))
    for noise in (np.triu(np.ones((p, p))), -np.eye(p)):
        with pytest.raises(ValueError, match="noise is a covariance: symmetric"):
            crossnobis(x, noise=noise)


def test_a_slow_ascent_is_followed_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 60, 5, 32))
    steps = []
    plain = stochastic._closest
    monkeypatch.setattr(stochastic, "_closest", lambda slope: steps.append(1) or plain(slope))
    found = sosie.measure("gaussian_shape_distance", x, y, starts=0)
    mixed = len(steps)
    monkeypatch.setattr(stochastic, "_mix", lambda goals, slopes: slopes[-1])
    assert found <= sosie.measure("gaussian_shape_distance", x, y, starts=0)
    assert mixed < (len(steps) - mixed) / 2
