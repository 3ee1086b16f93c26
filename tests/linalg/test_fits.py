"""Fits from moments against the same problems solved on the rows themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paired import correlated_rows
from torch import Tensor

from sosie.linalg import FITS, Affine, JointMoments, explained, find_fit, fit
from sosie.linalg.fits import define
from sosie.stats import Moments

EXAMPLES = {
    "least_squares": {},
    "ridge": {"strength": 0.1},
    "reduced_rank": {"k": 2},
    "procrustes": {},
    "permutation": {},
    "lasso": {"alpha": 0.05},
    "identity": {},
}


def joint(a: Tensor, b: Tensor) -> JointMoments:
    return Moments.of(a, b).joint()


def streamed(a: Tensor, b: Tensor, size: int) -> JointMoments:
    """The moments of batches, merged."""
    total: Moments | None = None
    for x, y in zip(a.split(size), b.split(size), strict=True):
        part = Moments.of(x, y)
        total = part if total is None else total.merge(part)
    assert total is not None
    return total.joint()


def regression_on_rows(a: Tensor, b: Tensor, intercept: bool = True) -> Affine:
    """Minimum-norm least squares on the whole matrix, centred in place of a column of ones."""
    mean_a, mean_b = (rows.mean(0) if intercept else torch.zeros(rows.shape[1]).double() for rows in (a, b))
    weight = torch.linalg.lstsq(a - mean_a, b - mean_b, rcond=1e-10, driver="gelsd").solution.T
    return Affine(weight, mean_b - weight @ mean_a)


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def r2_on_rows(a: Tensor, b: Tensor, found: Affine) -> float:
    return float(1 - (found(a) - b).square().sum() / (b - b.mean(0)).square().sum())


def test_joint_moments_are_those_of_the_rows() -> None:
    a, b = correlated_rows()
    m = streamed(a + 100, b, 7)
    both = np.cov(torch.cat([a, b], dim=1).numpy().T, bias=True)
    assert apart(m.mean_a, a.mean(0) + 100) < 1e-14
    assert apart(m.mean_b, b.mean(0)) < 1e-12
    assert np.allclose(m.cov_aa, both[:7, :7], rtol=1e-10)
    assert np.allclose(m.cov_ab, both[:7, 7:], rtol=1e-10)
    assert np.allclose(m.cov_bb, both[7:, 7:], rtol=1e-10)


def test_joint_moments_of_one_pair_of_several_sites() -> None:
    a, b = correlated_rows()
    several = Moments.of([b, a], [b[:, :2], a, b]).joint(1, 2)
    assert torch.allclose(several.cov_ab, joint(a, b).cov_ab)
    assert torch.allclose(several.mean_a, a.mean(0))
    assert torch.allclose(several.mean_b, b.mean(0))


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("size", [1, 13, 60, 400])
def test_streamed_least_squares_is_that_of_all_rows(size: int, intercept: bool) -> None:
    a, b = correlated_rows(n=400)
    found = fit(f"least_squares(intercept={intercept})", streamed(a, b, size))
    expected = regression_on_rows(a, b, intercept)
    assert apart(found.weight, expected.weight) < 1e-9
    assert apart(found.bias, expected.bias) < 1e-9 if intercept else not found.bias.any()
    assert found.report["r2"] == pytest.approx(r2_on_rows(a, b, expected), abs=1e-12)


def test_least_squares_with_offsets_and_columns_of_very_unequal_size() -> None:
    a, b = correlated_rows(n=300)
    scales = 10 ** torch.linspace(-6, 6, 7, dtype=torch.float64)
    found = fit("least_squares", streamed((a + 100) * scales, (b - 100) * 1e3, 64))
    expected = regression_on_rows(a, b)
    assert apart(found.weight * scales, expected.weight * 1e3) < 1e-8
    assert apart(found((a + 100) * scales) / 1e3 + 100, expected(a)) < 1e-8
    assert found.report["rank"] == 7


@pytest.mark.parametrize("size", [5, 30])
def test_least_squares_of_too_few_rows_is_the_shortest_solution(size: int) -> None:
    a, b = correlated_rows(n=30, p=45)
    found = fit("least_squares", streamed(a, b, size))
    assert apart(found.weight, regression_on_rows(a, b).weight) < 1e-8
    assert found.report["rank"] == 29
    assert found.report["r2"] == pytest.approx(1)


def test_least_squares_of_repeated_and_silent_neurons() -> None:
    a, b = correlated_rows()
    a = torch.cat([a, 3 * a[:, :2] + 1, torch.full((60, 1), 0.1).double()], dim=1)
    found = fit("least_squares", joint(a, b))
    assert apart(found.weight, regression_on_rows(a, b).weight) < 1e-9
    assert found.report["rank"] == 7
    assert not found.weight[:, -1].any()


def test_a_silent_output_is_its_mean() -> None:
    a, b = correlated_rows()
    b[:, 2], a[:, 4] = 0.7, 0.3
    for name, options in EXAMPLES.items():
        if name not in ("procrustes", "permutation", "identity"):
            found = FITS[name].using(**options)(joint(a, b))
            assert float(found.weight[2].abs().max()) < 1e-15, name
            assert float(found.bias[2]) == pytest.approx(0.7), name
            assert not found.weight[:, 4].any(), name


def noisy(cov: Tensor, k: int) -> Tensor:
    """The covariances, with rounding for what neuron k has."""
    cov = cov.clone()
    cov[k], cov[:, k] = 1e-17, 1e-17
    cov[k, k] = 1e-33
    return cov


@pytest.mark.parametrize("name", ["least_squares", "ridge", "reduced_rank", "lasso"])
def test_rounding_is_no_variation(name: str) -> None:
    a, b = correlated_rows(p=5, q=5)
    m = joint(a + 10, b + 10)
    options = EXAMPLES[name] | ({"alpha": 1e-20} if name == "lasso" else {})
    silent_a = replace(m, cov_aa=noisy(m.cov_aa, 1), cov_ab=m.cov_ab.index_fill(0, torch.tensor(1), 1e-17))
    silent_b = replace(m, cov_bb=noisy(m.cov_bb, 1), cov_ab=m.cov_ab.index_fill(1, torch.tensor(1), 1e-17))
    assert not FITS[name].using(**options)(silent_a).weight[:, 1].any()
    assert not FITS[name].using(**options)(silent_b).weight[1].any()


@pytest.mark.parametrize("strength", [1e-6, 0.1, 30])
def test_ridge_is_that_of_scikit_learn(strength: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    a, b = correlated_rows()
    found = fit(f"ridge(strength={strength})", streamed(a, b, 11))
    alpha = 60 * strength * float(a.var(0, correction=0).mean())
    expected = linear_model.Ridge(alpha=alpha, solver="svd").fit(a.numpy(), b.numpy())
    assert np.allclose(found.weight, expected.coef_, rtol=1e-9, atol=1e-12)
    assert np.allclose(found.bias, expected.intercept_, rtol=1e-9)
    assert found.report["penalty"] * 60 == pytest.approx(alpha)


@pytest.mark.parametrize(("p", "q"), [(5, 5), (4, 6)])
def test_procrustes_is_the_best_of_all_rotations(p: int, q: int) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    a, b = correlated_rows(p=p, q=q)
    found = fit("procrustes", streamed(a, b, 9))
    assert torch.allclose(found.weight.T @ found.weight, torch.eye(p).double())
    padded = torch.nn.functional.pad(a - a.mean(0), (0, q - p))
    expected = linalg.orthogonal_procrustes(padded.numpy(), (b - b.mean(0)).numpy())[0][:p]
    assert np.allclose(found.weight.T, expected, atol=1e-9)
    random = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-1, 1):
        turn = torch.randn(q, q, generator=random, dtype=torch.float64) * size
        other = torch.matrix_exp(turn - turn.T) @ found.weight
        bias = b.mean(0) - other @ a.mean(0)
        assert explained(joint(a, b), Affine(other, bias)) < found.report["r2"]


def test_procrustes_undoes_a_rotation_a_scale_and_a_shift() -> None:
    a, _ = correlated_rows()
    turn = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    b = 2.5 * a @ turn.T + 4
    found = fit("procrustes(scale=True)", joint(a, b))
    assert torch.allclose(found.weight, 2.5 * turn)
    assert torch.allclose(found.bias, torch.full((7,), 4.0).double())
    assert found.report["scale"] == pytest.approx(2.5)
    assert found.report["r2"] == pytest.approx(1)


def test_procrustes_into_fewer_neurons_has_orthonormal_rows_and_the_best_scale() -> None:
    a, b = correlated_rows(p=7, q=3)
    plain, scaled = fit("procrustes", joint(a, b)), fit("procrustes(scale=True)", joint(a, b))
    assert torch.allclose(plain.weight @ plain.weight.T, torch.eye(3).double())
    u, _, v = torch.linalg.svd((a - a.mean(0)).T @ (b - b.mean(0)), full_matrices=False)
    assert torch.allclose(plain.weight, (u @ v).T)
    for factor in (0.99, 1.01):
        weight = scaled.weight * factor
        worse = Affine(weight, b.mean(0) - weight @ a.mean(0))
        assert explained(joint(a, b), worse) < scaled.report["r2"]


def test_procrustes_about_zero_has_no_bias() -> None:
    a, b = correlated_rows(p=5, q=5)
    found = fit("procrustes(centre=False)", joint(a, b))
    u, _, v = torch.linalg.svd(a.T @ b)
    assert torch.allclose(found.weight, (u @ v).T)
    assert not found.bias.any()


def test_procrustes_counts_the_directions_that_can_turn_anywhere() -> None:
    a, b = correlated_rows(p=5, q=5)
    assert fit("procrustes", joint(a, b)).report["undetermined"] == 0
    assert fit("procrustes", joint(a, b[:, [0, 1, 0, 1, 1]])).report["undetermined"] == 3


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_reduced_rank_is_the_best_approximation_of_the_fitted_values(k: int, intercept: bool) -> None:
    a, b = correlated_rows()
    found = fit(f"reduced_rank(k={k}, intercept={intercept})", streamed(a, b, 17))
    full = regression_on_rows(a, b, intercept)
    mean_a, mean_b = (rows.mean(0) * intercept for rows in (a, b))
    fitted = (a - mean_a) @ full.weight.T
    u, s, v = torch.linalg.svd(fitted, full_matrices=False)
    assert apart(found(a) - mean_b, (u[:, :k] * s[:k]) @ v[:k]) < 1e-9
    assert int(torch.linalg.matrix_rank(found.weight, rtol=1e-9)) == k == found.report["rank"]


def test_truncated_weights_fit_worse_than_reduced_rank() -> None:
    a, b = correlated_rows()
    m = joint(a, b)
    best, cut = fit("reduced_rank(k=2)", m), fit("reduced_rank(k=2, truncate=True)", m)
    u, s, v = torch.linalg.svd(regression_on_rows(a, b).weight)
    assert torch.allclose(cut.weight, (u[:, :2] * s[:2]) @ v[:2])
    assert cut.report["r2"] < best.report["r2"] - 0.01


@pytest.mark.parametrize("by", ["correlation", "covariance"])
def test_permutation_finds_neurons_in_another_order(by: str) -> None:
    a, _ = correlated_rows(p=6)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    found = fit(f"permutation(by={by!r})", joint(a, a[:, order] + 2))
    assert torch.equal(found.weight, torch.eye(6).double()[order])
    assert torch.allclose(found.bias, torch.full((6,), 2.0).double())
    assert found.report["r2"] == pytest.approx(1)


def test_permutation_by_covariance_is_least_squares_among_permutations() -> None:
    from itertools import permutations

    a, b = correlated_rows(p=5, q=5)
    a, b = a - a.mean(0), b - b.mean(0)
    errors = {order: float((a[:, list(order)] - b).square().sum()) for order in permutations(range(5))}
    sums = {
        order: sum(np.corrcoef(a[:, i], b[:, j])[0, 1] for j, i in enumerate(order)) for order in permutations(range(5))
    }
    least, most = min(errors, key=errors.__getitem__), max(sums, key=sums.__getitem__)
    assert least != most
    assert tuple(fit("permutation(by='covariance')", joint(a, b)).weight.argmax(1).tolist()) == least
    assert tuple(fit("permutation", joint(a, b)).weight.argmax(1).tolist()) == most


@pytest.mark.parametrize(("p", "q"), [(4, 7), (7, 4)])
def test_permutation_of_unequal_widths_is_partial(p: int, q: int) -> None:
    a, b = correlated_rows(p=p, q=q)
    found = fit("permutation", joint(a, b))
    assert float(found.weight.sum()) == 4 == found.report["rank"]
    assert set(found.weight.unique().tolist()) == {0, 1}
    assert float(found.weight.sum(0).max()) == float(found.weight.sum(1).max()) == 1
    unmatched = found.weight.sum(1) == 0
    assert torch.allclose(found.bias[unmatched], b.mean(0)[unmatched])


def lasso_conditions_missed(a: Tensor, b: Tensor, found: Affine, alpha: float) -> float:
    """How far (a, b, weight) is from the conditions of a minimum, on the rows."""
    residual = b - found(a)
    assert float(residual.mean(0).abs().max()) < 1e-9  # the bias is free
    slope = (a - a.mean(0)).T @ residual / len(a)
    weight = found.weight.T
    return float(torch.where(weight == 0, torch.relu(slope.abs() - alpha), (slope - alpha * weight.sign()).abs()).max())


@pytest.mark.parametrize("alpha", [1e-4, 0.03, 0.3])
def test_lasso_is_that_of_scikit_learn(alpha: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    a, b = correlated_rows(n=200, p=12, q=6)
    found = fit(f"lasso(alpha={alpha})", streamed(a, b, 50))
    for j in range(6):
        expected = linear_model.Lasso(alpha=alpha, tol=1e-12, max_iter=10**6).fit(a.numpy(), b[:, j].numpy())
        assert np.allclose(found.weight[j], expected.coef_, atol=1e-7)
        assert float(found.bias[j]) == pytest.approx(expected.intercept_, abs=1e-6)
    assert lasso_conditions_missed(a, b, found, alpha) < 1e-6
    assert found.report["sparsity"] == pytest.approx(float((found.weight == 0).double().mean()))
    assert found.report["rank"] == int((found.weight != 0).any(0).sum())


def test_lasso_of_wide_and_collinear_neurons_meets_the_conditions_of_a_minimum() -> None:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(150, 8, generator=random, dtype=torch.float64)
    a = torch.relu(hidden @ torch.randn(8, 90, generator=random, dtype=torch.float64))  # 90 neurons of 8 causes
    a = torch.cat([a, a[:, :3], torch.zeros(150, 1).double()], dim=1)
    b = torch.relu(hidden @ torch.randn(8, 20, generator=random, dtype=torch.float64))
    for alpha in (1e-4, 1e-3, 1e-1):
        found = fit(f"lasso(alpha={alpha})", joint(a, b))
        assert lasso_conditions_missed(a, b, found, alpha) < 1e-6
        assert 0 < found.report["iterations"] < 1000


@pytest.mark.parametrize("alpha", [1e-8, 1e-5, 1e-2])
def test_lasso_of_more_neurons_than_rows_and_unequal_sizes(alpha: float) -> None:
    """Where coordinate descent alone is not done after a thousand sweeps."""
    random = torch.Generator().manual_seed(7)
    hidden = torch.randn(20, 4, generator=random, dtype=torch.float64)
    a = torch.relu(hidden @ torch.randn(4, 60, generator=random, dtype=torch.float64))
    a = a * 10 ** torch.linspace(-3, 3, 60, dtype=torch.float64)
    b = torch.relu(hidden @ torch.randn(4, 3, generator=random, dtype=torch.float64))
    found = fit(f"lasso(alpha={alpha})", joint(a, b))
    assert found.report["iterations"] < 100
    assert found.report["violation"] < 1e-7
    slope, weight = (a - a.mean(0)).T @ (b - found(a)) / 20, found.weight.T
    missed = torch.where(weight == 0, torch.relu(slope.abs() - alpha), (slope - alpha * weight.sign()).abs())
    assert float((missed / (a.std(0)[:, None] * b.std(0))).nan_to_num().max()) < 1e-7


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(3, 40),
    p=st.integers(1, 12),
    q=st.integers(1, 5),
    alpha=st.floats(1e-3, 10),
    seed=st.integers(0, 10**6),
)
def test_lasso_meets_the_conditions_of_a_minimum(n: int, p: int, q: int, alpha: float, seed: int) -> None:
    a, b = correlated_rows(n=n, p=p, q=q, seed=seed)
    missed = lasso_conditions_missed(a, b, fit(f"lasso(alpha={alpha})", joint(a, b)), alpha)
    assert missed < 1e-6 * max(1.0, alpha)  # slopes are held against alpha


def test_a_strong_penalty_leaves_no_weights_and_a_weak_one_least_squares() -> None:
    a, b = correlated_rows()
    m = joint(a, b)
    most = float(m.cov_ab.abs().max())
    none = fit(f"lasso(alpha={most * 1.001})", m)
    assert none.report["sparsity"] == 1
    assert none.report["r2"] == pytest.approx(0)
    assert torch.allclose(none.bias, m.mean_b)
    assert int((fit(f"lasso(alpha={most * 0.999})", m).weight != 0).sum()) == 1
    assert apart(fit("lasso(alpha=1e-9)", m).weight, fit("least_squares", m).weight) < 1e-6


def test_lasso_of_plain_neurons_needs_few_sweeps() -> None:
    random = torch.Generator().manual_seed(0)
    a = torch.randn(3000, 150, generator=random, dtype=torch.float64)
    b = a[:, :100] @ torch.randn(100, 4, generator=random, dtype=torch.float64)
    found = fit("lasso(alpha=0.05, tolerance=1e-6)", joint(a, b))
    assert lasso_conditions_missed(a, b, found, 0.05) < 1e-4
    assert found.report["iterations"] <= 16


def test_lasso_says_when_it_is_not_done() -> None:
    a, b = correlated_rows(p=30)
    with pytest.raises(ValueError, match="not converged after 1 sweeps"):
        fit("lasso(alpha=0.001, sweeps=1)", joint(a, b))


def test_identity_leaves_rows_as_they_are() -> None:
    a, _ = correlated_rows()
    found = fit("identity", joint(a, a))
    assert torch.equal(found(a), a)
    assert torch.equal(fit("identity", joint(a, a + 1))(a), a)
    assert found.report["r2"] == pytest.approx(1)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_fit_reports_what_it_explains(name: str) -> None:
    a, b = correlated_rows(p=5, q=5)
    b = b + 0.5 * a
    m = streamed(a, b, 8)
    found = FITS[name].using(**EXAMPLES[name])(m)
    assert {"r2", "rank", "condition", "iterations"} <= set(found.report)
    assert found.weight.shape == (5, 5)
    assert found.weight.dtype == torch.float64
    assert found.report["r2"] == pytest.approx(r2_on_rows(a, b, found), abs=1e-10)
    assert found.report["r2"] <= fit("least_squares", m).report["r2"] + 1e-12


def test_every_fit_has_an_example() -> None:
    assert set(EXAMPLES) == set(FITS)


def test_explained_of_any_map_is_that_of_the_rows() -> None:
    a, b = correlated_rows()
    weight, bias = torch.ones(5, 7).double() / 9, torch.arange(5).double()
    found = Affine(weight, bias)
    assert explained(joint(a, b), found) == pytest.approx(r2_on_rows(a, b, found))
    about_zero = float(1 - (found(a) - b).square().sum() / b.square().sum())
    assert explained(joint(a, b), found, about="zero") == pytest.approx(about_zero)


def test_a_map_applies_in_the_precision_of_the_rows() -> None:
    a, b = correlated_rows()
    found = fit("least_squares", joint(a, b))
    assert found(a.float()).dtype == torch.float32
    assert torch.allclose(found(a.float().view(3, 20, 7)).double(), found(a).view(3, 20, 5), atol=1e-4)


def test_directions_that_moments_do_not_carry_are_counted() -> None:
    a, b = correlated_rows()
    assert fit("least_squares", joint(a, b)).report["dropped"] == 0
    twice = torch.cat([a, a[:, :3], a @ torch.ones(a.shape[1], 2, dtype=a.dtype)], dim=1)
    assert fit("least_squares", joint(twice, b)).report["dropped"] == 0, "A does not have these"
    far = a + 3e4 * a.sum(1, keepdim=True)
    found = fit("least_squares", joint(far, b)).report
    assert found["dropped"] == a.shape[1] - found["rank"] > 0


def test_the_condition_is_that_of_the_correlations() -> None:
    a, b = correlated_rows()
    assert fit("least_squares", joint(a, b)).report["condition"] == pytest.approx(np.linalg.cond(np.corrcoef(a.T)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("least_square", "did you mean 'least_squares'"),
        ("nothing at all", "there are .*least_squares"),
        ("ridge", "ridge needs a value for strength"),
        ("ridge(alpha=1)", "no option 'alpha'; it has strength"),
        ("ridge(strength=0)", "strength must be a number above 0, got 0"),
        ("ridge(strength='a')", "strength must be a number"),
        ("lasso(alpha=-1)", "alpha must be a number above 0, got -1"),
        ("lasso(alpha=1, sweeps=0)", "sweeps must be a whole number"),
        ("reduced_rank(k=0)", "k must be a whole number from 1 to 5, got 0"),
        ("reduced_rank(k=6)", "k must be a whole number from 1 to 5, got 6"),
        ("reduced_rank(k=True)", "k must be a whole number"),
        ("least_squares(intercept=1)", "intercept of least_squares is True or False"),
        ("least_squares(tolerance=0)", "tolerance must be a number above 0"),
        ("permutation(by='luck')", "'correlation', 'covariance'"),
        ("identity", "identity needs equal widths, got 7 and 5"),
        ("reduced_rank(8)", "write options as"),
    ],
)
def test_bad_fits_are_refused_in_words(text: str, words: str) -> None:
    a, b = correlated_rows()
    with pytest.raises(ValueError, match=words):
        fit(text, joint(a, b))


def test_bad_moments_are_refused_in_words() -> None:
    a, b = correlated_rows()
    m = joint(a, b)
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        joint(a[:1], b[:1])
    with pytest.raises(ValueError, match="no feature of A varies over the 60 rows"):
        joint(torch.full((60, 3), 0.1).double(), b)
    with pytest.raises(ValueError, match="no feature of B varies"):
        joint(a, torch.full((60, 2), 1e8 / 3).double())
    with pytest.raises(ValueError, match="cov_ab is not finite"):
        replace(m, cov_ab=m.cov_ab * torch.inf)
    with pytest.raises(ValueError, match=r"need a weight \(5, 7\), got \(5, 6\)"):
        explained(m, Affine(torch.zeros(5, 6).double(), torch.zeros(5).double()))
    with pytest.raises(ValueError, match="no covariance at all"):
        fit("procrustes", replace(m, cov_ab=torch.zeros(7, 5).double()))


def test_a_fit_says_its_options() -> None:
    found = find_fit("reduced_rank( k = 2 )")
    assert found.name == "reduced_rank(k=2)"
    assert find_fit(found) is found
    assert found.using(truncate=True).name == "reduced_rank(k=2, truncate=True)"


def test_a_fit_is_defined_once() -> None:
    def ridge(m: JointMoments) -> Affine:
        raise NotImplementedError

    with pytest.raises(ValueError, match="'ridge' is already defined"):
        define(ridge)
