"""Gaussian information: by entropies and determinants, where it is infinite, its bias, and what CKA says of it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import sosie
from sosie.measures import MEASURES
from sosie.measures.correlations import of_independent_rows
from sosie.train import Penalty

INFORMATION = MEASURES["gaussian_information"]
N = 200  # rows
Array = np.ndarray


def rows_with(correlations: Array, loud_x: Array, loud_y: Array, n: int = N) -> tuple[Array, Array]:
    """Rows with just these canonical correlations and these variances of the canonical variables, in the sample."""
    k = len(correlations)
    random = np.random.RandomState(0).randn(n, 2 * k)
    basis = np.linalg.qr(np.c_[np.ones(n), random])[0][:, 1:] * np.sqrt(n)  # uncorrelated, of mean 0 and variance 1
    x, rest = basis[:, :k], basis[:, k:]
    y = x * correlations + rest * np.sqrt((1 - correlations) * (1 + correlations))
    return x * np.sqrt(loud_x), y * np.sqrt(loud_y)


def white(*correlations: float) -> tuple[Array, Array]:
    ones = np.ones(len(correlations))
    return rows_with(np.array(correlations), ones, ones)


def information(x: Array, y: Array) -> float:
    return sosie.measure("gaussian_information", x, y)


def cka(x: Array, y: Array) -> float:
    return sosie.measure("linear_cka", x, y)


def mixed(rows: Array, conditioned: float, seed: int = 0) -> Array:
    """The rows in other neurons, whose covariance has eigenvalues that far apart."""
    random = np.random.RandomState(seed)
    width = rows.shape[1]
    u, v = (np.linalg.qr(random.randn(width, width))[0] for _ in range(2))
    return rows @ (u * np.logspace(0, -np.log10(conditioned) / 2, width)) @ v


# Values


def test_it_is_the_difference_of_entropies_with_the_half() -> None:
    """SciPy has the entropies, with their ½; the paper's Eq. 2 leaves it out and is twice as large."""
    random = np.random.RandomState(0)
    x = random.randn(200, 4)
    y = x @ random.randn(4, 3) + random.randn(200, 3)
    covariance = np.cov(np.c_[x, y].T)
    whole = scipy.stats.multivariate_normal(cov=covariance).entropy()
    parts = [scipy.stats.multivariate_normal(cov=covariance[own, own]).entropy() for own in (slice(4), slice(4, 7))]
    found = information(x, y)
    assert found == pytest.approx(sum(parts) - whole, abs=1e-10)
    printed = [np.linalg.slogdet(c)[1] for c in (covariance[:4, :4], covariance[4:, 4:], covariance)]
    assert printed[0] + printed[1] - printed[2] == pytest.approx(2 * found, abs=1e-10)


def test_two_neurons_by_their_correlation() -> None:
    random = np.random.RandomState(0)
    x = random.randn(50, 1)
    y = 0.7 * x + random.randn(50, 1)
    rho = scipy.stats.pearsonr(x[:, 0], y[:, 0]).statistic
    assert information(x, y) == pytest.approx(-0.5 * np.log(1 - rho**2), abs=1e-12)


@pytest.mark.parametrize("conditioned", [1, 1e4, 1e6])
def test_known_correlations_in_any_neurons(conditioned: float) -> None:
    correlations = np.array([0.999, 0.9, 0.5, 0.1, 0.0])
    x, y = white(*correlations)
    expected = -0.5 * np.log1p(-(correlations**2)).sum()
    assert information(mixed(x, conditioned), mixed(y, conditioned, 1)) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("left", [1e-9, 1e-5])
def test_correlations_near_1(left: float) -> None:
    """Of 1 − ρ² = 1e-9 seven digits are left."""
    assert information(*white(np.sqrt(1 - left))) == pytest.approx(-0.5 * np.log(left), abs=1e-6)


def test_correlations_near_0() -> None:
    """ln(1 − ρ²) without log1p has four digits here."""
    assert information(*white(1e-6)) == pytest.approx(0.5e-12, rel=1e-8, abs=0)


# Where it is infinite


def test_rows_with_themselves_and_with_a_linear_map_are_refused() -> None:
    x, y = white(0.5, 0.2, 0.1)
    with pytest.raises(ValueError, match=r"infinite: 3 of 3 canonical correlations are 1 .*mean_cca has a value"):
        information(x, mixed(x, 10))
    with pytest.raises(ValueError, match="infinite: 1 of 3 canonical correlations"):
        information(x, np.c_[y, x.sum(1)])
    with pytest.raises(ValueError, match="infinite"):  # what float32 leaves of a linear map
        information(x.astype(np.float32), x.astype(np.float32) @ np.random.RandomState(0).randn(3, 2).astype("f"))


def test_what_rounding_decides_is_refused_too() -> None:
    """Neurons that nearly repeat one another: 1 − ρ² = 1e-8 is no longer to be told from 0."""
    x, y = white(np.sqrt(1 - 1e-8), 0.5, 0.2)
    expected = -0.5 * (np.log(1e-8) + np.log(0.75) + np.log(0.96))
    assert information(x, y) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match=r"1 − ρ² ≤ [1-9]e-0[67]"):
        information(mixed(x, 1e9), mixed(y, 1e9, 1))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_as_many_rows_as_dimensions_are_too_few_and_one_more_is_enough() -> None:
    random = np.random.RandomState(0)
    x, y = random.randn(21, 12), random.randn(21, 8)
    assert np.isfinite(information(x, y))
    with pytest.raises(ValueError, match=r"12 and 8 dimensions for n=20 rows, 1 of 8 .* take more than 20 rows"):
        information(x[:20], y[:20])
    with pytest.raises(ValueError, match="19 and 8 dimensions for n=20 rows, 8 of 8"):
        information(random.randn(20, 50), y[:20])


def test_dead_and_repeated_neurons_are_no_dimensions() -> None:
    x, y = white(0.8, 0.3)
    worse = np.c_[x, np.full(N, 0.3), x[:, :1], 1e-7 * x[:, 1:]]
    assert information(worse, y) == pytest.approx(information(x, y), abs=1e-8)
    wide = x @ np.random.RandomState(0).randn(2, N + 10)  # more neurons than rows, of rank 2
    assert information(wide, y) == pytest.approx(information(x, y), abs=1e-8)
    with pytest.raises(ValueError, match="x does not vary"):
        information(np.ones((N, 2)), y)


def test_infinite_pairs_of_a_comparison_have_a_reason_and_the_others_a_value() -> None:
    x, y = white(0.5, 0.2, 0.1)
    c = sosie.compare({"a": x, "b": y}, {"a": x, "dead": np.ones((N, 2))}, measures="gaussian_information")
    assert np.isnan(c.matrix()[0, 0])
    assert c.matrix()[1, 0] == pytest.approx(information(x, y), abs=1e-12)
    texts = {(row["site_a"], row["site_b"]): " ".join(row["caveats"]) for row in c.rows()}
    assert "undefined: infinite: 3 of 3" in texts["a", "a"]
    assert "features do not vary" in texts["a", "dead"]
    assert not texts["b", "a"]


# Bias and chance


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_bias_is_the_chance_level_whatever_the_information(strength: float) -> None:
    """Simulated: 1500 samples of 30 Gaussian rows, 4 and 3 neurons, two canonical correlations of 0 or 0.5."""
    random, found = np.random.default_rng(0), []
    for _ in range(1500):
        x, y = random.normal(size=(30, 4)), random.normal(size=(30, 3))
        y[:, :2] = strength * x[:, :2] + np.sqrt(1 - strength**2) * y[:, :2]
        found.append(float(INFORMATION.of(torch.from_numpy(x), torch.from_numpy(y))))
    mean, spread = of_independent_rows(30, 4, 3)
    truth = -np.log(1 - strength**2)
    assert np.mean(found) - truth == pytest.approx(mean, abs=4 * np.std(found) / 1500**0.5)
    if not strength:
        assert np.std(found) == pytest.approx(spread, rel=0.08)


def test_chance_level_in_its_limits() -> None:
    assert of_independent_rows(50, 4, 7) == pytest.approx(of_independent_rows(50, 7, 4), rel=1e-12)
    mean, spread = of_independent_rows(10**6, 4, 7)
    assert mean == pytest.approx(28 / 2e6, rel=1e-4)
    assert spread == pytest.approx(np.sqrt(28 / 2) / 1e6, rel=1e-4)  # 2 n I is χ² with p q degrees of freedom
    assert np.isnan(of_independent_rows(11, 4, 7)).all()


def test_chance_and_bias_stand_beside_the_value() -> None:
    random = np.random.RandomState(0)
    a, b = {"a": random.randn(400, 12)}, {"b": random.randn(400, 9), "c": random.randn(400, 2)}
    c = sosie.compare(a, b, measures="gaussian_information", null="permutation", draws=99, interval=True)
    rows = {row["site_b"]: row for row in c.rows()}
    mean, spread = of_independent_rows(400, 12, 9)
    assert (rows["b"]["null"], rows["b"]["null_spread"]) == pytest.approx((mean, spread))
    assert abs(rows["b"]["value"] - mean) < 4 * spread
    assert rows["b"]["p"] > 0.01
    assert rows["b"]["score"] is None
    assert rows["b"]["low"] < rows["b"]["value"] < rows["b"]["high"]
    assert any("12 and 9 dimensions for n=400 rows: biased up by 0.14" in text for text in rows["b"]["caveats"])
    assert not any("biased" in text for text in rows["c"]["caveats"])
    with pytest.warns(UserWarning, match="biased up by 0.14"):
        information(a["a"], b["b"])


# CKA is not information: Lemmas 1 and 2 of the CKA-SR paper


def test_one_neuron_a_side_has_cka_and_information_rise_together() -> None:
    """CKA is ρ² there: I = −½ ln(1 − CKA)."""
    for rho in (0.1, 0.5, 0.9, 0.99):
        x, y = white(rho)
        assert information(x, y) == pytest.approx(-0.5 * np.log1p(-cka(x, y)), rel=1e-9)


def test_a_cross_covariance_that_shrinks_as_a_whole_lowers_both() -> None:
    """Lemma 1 and 2 where they hold: variances as they are, all correlations times t; both are 0 at 0 together."""
    correlations = np.array([0.9, 0.7, 0.2])
    pairs = [rows_with(t * correlations, np.array([3, 1, 0.1]), np.array([1, 2, 0.3])) for t in (0, 0.25, 0.5, 1)]
    for found in ([cka(*pair) for pair in pairs], [information(*pair) for pair in pairs]):
        assert found[0] == pytest.approx(0, abs=1e-12)
        assert (np.diff(found) > 0.01).all()


def test_cka_falls_from_80_to_0_while_information_rises_from_08_to_69() -> None:
    """Lemma 2 fails, with both sides' covariances held fixed: what is shared moves from the loud to the quiet neurons.

    So does Lemma 1, where it says more than that both are 0 together: ‖XᵀY‖ falls as well.
    """
    loud = np.array([1, 0.0183, 0.0183, 0.0183])
    first, last = np.sqrt([0.8, 0, 0, 0]), np.sqrt([0, 0.99, 0.99, 0.99])
    path = [rows_with((1 - t) * first + t * last, loud, loud) for t in np.linspace(0, 1, 6)]
    for x, y in path:  # nothing changes but what is shared
        assert np.cov(x.T, bias=True) == pytest.approx(np.diag(loud), abs=1e-12)
        assert np.cov(y.T, bias=True) == pytest.approx(np.diag(loud), abs=1e-12)
    alike, shared = np.array([cka(*pair) for pair in path]), np.array([information(*pair) for pair in path])
    assert alike[[0, -1]] == pytest.approx([0.799, 0.00099], abs=5e-4)
    assert shared[[0, -1]] == pytest.approx([0.805, 6.908], abs=5e-4)
    assert shared[0] == pytest.approx(-0.5 * np.log(0.2), abs=1e-10)
    assert shared[-1] == pytest.approx(-1.5 * np.log(0.01), abs=1e-10)
    assert (np.diff(alike) < 0).all()
    assert shared[-1] > 8 * shared[0]
    norms = [np.linalg.norm(x.T @ y) / N for x, y in (path[0], path[-1])]
    assert norms == pytest.approx([0.894, 0.0315], abs=5e-4)


def test_white_rows_do_not_save_the_lemma() -> None:
    """With every direction as loud as the others CKA is the mean of ρ², and information weighs large ones more."""
    one, two = white(0.9, 0.0), white(0.7, 0.7)
    assert (cka(*one), cka(*two)) == pytest.approx((0.405, 0.49), abs=1e-9)
    assert (information(*one), information(*two)) == pytest.approx((0.830, 0.673), abs=1e-3)


def test_a_smaller_scale_lowers_the_cross_covariance_and_neither_of_the_two() -> None:
    x, y = white(0.9, 0.3)
    assert np.linalg.norm(x.T @ (y / 10)) < 0.11 * np.linalg.norm(x.T @ y)
    assert information(x, y / 10) == pytest.approx(information(x, y), abs=1e-10)
    assert cka(x, y / 10) == pytest.approx(cka(x, y), abs=1e-10)


# In training


def test_gradients() -> None:
    x, y = (torch.from_numpy(side[:40]).requires_grad_() for side in white(0.9, 0.5, 0.5))  # equal ones among them
    assert torch.autograd.gradcheck(INFORMATION.of, (x, y))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh()).double()
    given = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)

    def total(inputs: Tensor) -> Tensor:
        with Penalty(model, "gaussian_information", ["1", "3"], 1.0, pairs="all", rows=None, every=1) as penalty:
            model(inputs)
            return penalty()

    assert torch.autograd.gradcheck(total, given)


def test_a_penalty_on_information_lowers_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    inputs, seen = torch.randn(100, 4), []
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    with Penalty(model, "gaussian_information", ["1", "3"], 1.0, pairs="all", rows=None, every=1) as penalty:
        for _ in range(30):
            model(inputs)
            optimiser.zero_grad()
            penalty().backward()
            optimiser.step()
            seen.append(penalty.last[0]["value"])
    assert seen[-1] < 0.8 * seen[0]


def test_a_penalty_names_the_layers_whose_information_is_infinite() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def of(rows: int) -> None:
        with Penalty(model, "gaussian_information", ["0", "1"], pairs="all", rows=rows) as penalty:
            model(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
            penalty()

    with pytest.raises(ValueError, match="gaussian_information of '0' and '1': infinite: 4 of 4"):
        of(20)
    with pytest.raises(ValueError, match="of '0' and '1': infinite: with 4 and 4 dimensions for n=8 rows"):
        of(8)
    with pytest.raises(ValueError, match=r"no largest value.*mean_cca"):
        Penalty(model, "gaussian_information", target=nn.Sequential(nn.Linear(4, 4)))
