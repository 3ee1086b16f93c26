"""Standard errors against variances that are known, and where halves of the rows are no guide."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import t

import sosie
from sosie.engine.uncertainty import HALVED, by_halves, by_jackknife, halves_of_groups, quarters_of_groups
from sosie.stats import dealt_evenly

Array = np.ndarray


def on_parts(statistic: Callable[[Array], float], x: Array, kept: Array) -> Array:
    group = dealt_evenly(len(x), kept.shape[-1]).numpy()
    found = [statistic(x[groups[group]]) for groups in kept.reshape(-1, kept.shape[-1])]
    return np.array(found).reshape(kept.shape[:-1])


def ways(statistic: Callable[[Array], float], x: Array) -> tuple[float, float]:
    """The variance by halves, and by the jackknife."""
    error, _ = by_halves(*(on_parts(statistic, x, kept()) for kept in (halves_of_groups, quarters_of_groups)))
    jackknifed = by_jackknife(on_parts(statistic, x, ~np.eye(HALVED, dtype=bool)))
    return float(error.size**2), float(jackknifed.size**2)


def products(x: Array) -> float:
    """Mean ⟨x, y⟩ over pairs of different rows: for d standard normal columns its variance is 2 d / (n (n − 1))."""
    return float((np.square(x.sum(0)).sum() - np.square(x).sum()) / (len(x) * (len(x) - 1)))


def test_every_half_and_every_quarter_has_its_share() -> None:
    halves, quarters = halves_of_groups(), quarters_of_groups()
    assert halves.shape == (31, 2, 32)
    assert quarters.shape == (13, 4, 32)
    for kept in (halves, quarters):
        assert (kept.sum(1) == 1).all()  # each group in one of them
        assert (kept.sum(2) == 32 // kept.shape[1]).all()
    signs = np.where(halves[:, 0], 1, -1)
    assert (signs @ signs.T == 32 * np.eye(31)).all()


def test_halves_of_a_mean_give_its_variance() -> None:
    """As many orthogonal contrasts as there are: the variance of the 32 means over 32."""
    x = np.random.default_rng(0).normal(size=320)
    halves = on_parts(np.mean, x, halves_of_groups())
    means = np.array([x[dealt_evenly(320, 32).numpy() == group].mean() for group in range(32)])
    expected = means.var(ddof=1) / 32
    assert halves.var(1, ddof=1).mean() / 2 == pytest.approx(expected, rel=1e-12)
    assert by_jackknife(on_parts(np.mean, x, ~np.eye(32, dtype=bool))).size ** 2 == pytest.approx(expected, rel=1e-12)


def test_what_pairs_of_rows_do_together_counts_once() -> None:
    """A mean beside a mean over pairs, equal parts of the variance: 1 + 1, which the jackknife counts as 1 + 2."""
    n, d, random = 128, 30, np.random.default_rng(0)
    part = 2 * d / (n * (n - 1))
    drawn = [random.normal(size=(n, d)) for _ in range(200)]
    found = [ways(lambda x: (part * n) ** 0.5 * x[:, 0].mean() + products(x), x) for x in drawn]
    by_half, jackknifed = np.mean(found, axis=0) / (2 * part)
    assert by_half == pytest.approx(1, abs=0.15)
    assert jackknifed == pytest.approx(1.5, abs=0.15)


def test_no_variance_is_below_0() -> None:
    """Of pairs alone a is 0, and its estimate is as often below."""
    random = np.random.default_rng(0)
    found = [ways(products, random.normal(size=(64, 1)))[0] for _ in range(100)]
    assert min(found) > 0


def covered(x: Array, mean: float) -> float:
    """How often the interval holds the mean: x (repetitions, rows), the jackknife with 20 groups."""
    groups = x.reshape(len(x), 20, -1).mean(2).T
    value = groups.mean(0)
    below, above = by_jackknife((groups.sum(0) - groups) / 19).reach(0.95)
    return float(((value - below <= mean) & (mean <= value + above)).mean())


def test_heavy_tails_make_the_interval_longer() -> None:
    """Student's t with 19 degrees of freedom covers 0.925 of the first and 0.951 of the second."""
    random = np.random.default_rng(0)
    assert covered(random.lognormal(size=(4000, 100)), np.exp(0.5)) > 0.94
    assert covered(random.normal(size=(4000, 100)), 0) == pytest.approx(0.95, abs=0.015)


def test_the_interval_is_longer_where_the_tail_is() -> None:
    left = np.zeros((20, 3))
    left[0] = -1, 0, 1  # without it the value is lower: it raises the value
    below, above = by_jackknife(left).reach(0.95)
    assert above[0] > below[0] > 0
    assert below[2] > above[2] > 0
    assert below[1] == above[1] == 0


def test_halves_see_the_same_tails_as_the_jackknife() -> None:
    """Of a mean both know what each of the 32 groups does to it."""
    x = np.random.default_rng(0).lognormal(size=320)
    error, _ = by_halves(*(on_parts(np.mean, x, kept()) for kept in (halves_of_groups, quarters_of_groups)))
    jackknifed = by_jackknife(on_parts(np.mean, x, ~np.eye(HALVED, dtype=bool)))
    assert jackknifed.skewness > 0.1
    assert error.skewness == pytest.approx(jackknifed.skewness, rel=1e-9)
    assert 2 / error.freedom - 2.5 * 2 / 31 == pytest.approx(2 / jackknifed.freedom - 2 / 31, rel=1e-9)


def related(n: int, seed: int, width: int = 12) -> tuple[dict[str, Array], dict[str, Array]]:
    random, mix = np.random.default_rng(seed), np.random.default_rng(0)
    z = random.normal(size=(n, 4))
    x, y = (z @ mix.normal(size=(4, width)) + random.normal(size=(n, width)) for _ in range(2))
    return {"x": x}, {"y": y}


@pytest.mark.parametrize("name", ["mean_cca", "mutual_knn"])
def test_the_error_is_how_far_values_spread(name: str) -> None:
    """For both the jackknife gives about 1.5 times as much."""
    found = [sosie.compare(*related(160, seed), measures=name, interval=True)[name] for seed in range(40)]
    spread = np.std([c.value[0, 0] for c in found], ddof=1)
    reach = np.array([c.high[0, 0] - c.low[0, 0] for c in found]) / 2
    error = np.sqrt(np.mean((reach / t.ppf(0.975, 31 / 2.5)) ** 2))
    assert error / spread == pytest.approx(1, abs=0.3)


def jackknife_of(name: str, x: Array, y: Array) -> tuple[float, float]:
    """How far the interval of the jackknife reaches down and up."""
    rows = np.concatenate([x, y], 1)
    width = x.shape[1]
    count = min(20, len(x) // 4)
    left = on_parts(lambda r: sosie.measure(name, r[:, :width], r[:, width:]), rows, ~np.eye(count, dtype=bool))
    below, above = by_jackknife(left).reach(0.95)
    return float(below), float(above)


@pytest.mark.parametrize(
    ("name", "n", "width"),
    [("mean_cca", 160, 90), ("mutual_knn(k=35)", 128, 12), ("mean_cca", 100, 12)],
    ids=["halves saturate", "quarters have no value", "few rows"],
)
def test_where_halves_are_no_guide_the_jackknife_is(name: str, n: int, width: int) -> None:
    a, b = related(n, 0, width)
    found = sosie.compare(a, b, measures=name, interval=True)[name]
    below, above = jackknife_of(name, a["x"], b["y"])
    assert below > 0
    assert found.value[0, 0] - found.low[0, 0] == pytest.approx(below, rel=1e-6)
    assert found.high[0, 0] - found.value[0, 0] == pytest.approx(above, rel=1e-6)
