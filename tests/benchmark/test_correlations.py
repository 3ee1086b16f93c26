"""Correlations of the benchmark against SciPy, published examples and known coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from sosie.benchmark.trials import (
    bootstrap,
    meng,
    pearson,
    percentile_interval,
    spearman,
    weighted_pearson,
    weighted_spearman,
)


def correlated(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=n)
    return x, 0.6 * x + random.normal(size=n).round(1)


def test_pearson_and_its_interval_are_scipys() -> None:
    x, y = correlated()
    found, wanted = pearson(x, y), stats.pearsonr(x, y)
    assert found.value == pytest.approx(wanted.statistic, abs=1e-13)
    low, high = wanted.confidence_interval(0.95)  # SciPy's default is Fisher's z too
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    z = math.atanh(wanted.statistic) * math.sqrt(len(x) - 3)
    assert found.p == pytest.approx(2 * stats.norm.sf(z))


def test_spearman_with_ties_is_scipys() -> None:
    x, y = (v.round(0) for v in correlated(seed=1))
    assert len(np.unique(x)) < len(x)
    assert spearman(x, y).value == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-13)


def test_a_perfect_correlation_has_no_width() -> None:
    found = spearman(np.arange(9.0), np.arange(9.0) ** 3)
    assert (found.value, found.low, found.high, found.p) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones(8), "is 1 for all 8 pairs"),
        (np.arange(3.0), "at least 4 pairs, got 3"),
        (np.array([0, 1, np.nan, 3]), "1 values that are not finite"),
    ],
)
def test_what_has_no_correlation_is_told(x: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pearson(x, np.arange(float(len(x))))


def test_weights_count_pairs_as_often_as_they_are_repeated() -> None:
    x, y = correlated(20, seed=2)
    x = x.round(1)
    weights = np.random.default_rng(3).integers(0, 4, size=(5, 20)).astype(float)
    for k, row in enumerate(weights.astype(int)):
        repeated = np.repeat(x, row), np.repeat(y, row)
        assert weighted_pearson(x, y, weights)[k] == pytest.approx(stats.pearsonr(*repeated).statistic, abs=1e-12)
        assert weighted_spearman(x, y, weights)[k] == pytest.approx(stats.spearmanr(*repeated).statistic, abs=1e-12)


def test_a_draw_in_which_nothing_varies_is_undefined() -> None:
    weights = np.array([[3.0, 0, 0, 0], [1, 1, 1, 1]])
    found = weighted_pearson(np.array([0.1, 0.2, 0.4, 0.3]), np.arange(4.0), weights)
    assert np.isnan(found[0])
    assert np.isfinite(found[1])


def test_meng_rosenthal_and_rubins_own_example() -> None:
    # Meng, Rosenthal and Rubin 1992, p. 173: 15 observations, Z = 1.68, p = .0465 one-tailed.
    z, p = meng(0.63, -0.03, -0.19, 15)
    assert round(z, 2) == 1.68
    assert p / 2 == pytest.approx(0.0465, abs=2e-4)


def test_it_agrees_with_williams_t() -> None:
    # Steiger 1980, case A: psych's r.test(103, .4, .5, .1) prints t = -0.89, p < 0.37.
    z, p = meng(0.4, 0.5, 0.1, 103)
    assert p == pytest.approx(0.37, abs=0.02)
    assert meng(0.5, 0.4, 0.1, 103)[0] == -z


def test_impossible_correlations_are_refused() -> None:
    with pytest.raises(ValueError, match="no three variables"):
        meng(0.9, -0.9, 0.9, 30)
    with pytest.raises(ValueError, match="perfect"):
        meng(1.0, 0.5, 0.5, 30)
    with pytest.raises(ValueError, match="at least 4"):
        meng(0.1, 0.2, 0.3, 3)


def shared(seed: int, models: int = 12) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Independent x and y of all pairs, each the sum of two models' terms: pairs share models."""
    random = np.random.default_rng(seed)
    a, b = np.triu_indices(models, 1)
    x, y = (own[a] + own[b] + 0.1 * random.normal(size=len(a)) for own in random.normal(size=(2, models)))
    return x, y, (a, b)


def test_pairs_that_share_models_need_the_bootstrap_over_models() -> None:
    fisher = models = 0
    for seed in range(60):
        x, y, units = shared(seed)
        found, reach = pearson(x, y), percentile_interval(bootstrap(x, y, units, ranks=False, draws=300, seed=seed))
        assert reach is not None
        fisher += found.low <= 0 <= found.high
        models += reach[0] <= 0 <= reach[1]
    assert fisher < 42  # of 60 intervals that should hold 0 in 57
    assert models > fisher + 8


def test_draws_are_seeded_and_shared_between_measures() -> None:
    x, y, units = shared(0)
    first = bootstrap(x, y, units, ranks=True, draws=300, seed=1)
    assert np.array_equal(first, bootstrap(2 * x + 1, y, units, ranks=True, draws=300, seed=1))
    assert not np.array_equal(first, bootstrap(x, y, units, ranks=True, draws=300, seed=2))
    assert len(first) == 300


def test_pairs_within_one_unit_count_once() -> None:
    x, y = correlated(30, seed=5)
    alone = np.arange(30)
    found = bootstrap(x, y, (alone, alone), ranks=False, draws=2000, seed=0)
    spread = np.nanstd(np.arctanh(found))
    assert spread == pytest.approx(1 / math.sqrt(27), rel=0.25)  # the plain bootstrap over cases
