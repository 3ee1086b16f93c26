"""predictivity against scikit-learn, and in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paired import correlated_rows
from scipy.stats import pearsonr
from sklearn.cross_decomposition import PLSRegression
from sklearn.linear_model import LinearRegression, Ridge, RidgeCV
from sklearn.metrics import explained_variance_score, r2_score
from sklearn.model_selection import GroupKFold, PredefinedSplit
from torch import nn

import sosie
from sosie.data import DataPart
from sosie.measures.prediction import STRENGTHS, predictivity
from sosie.stats import dealt_folds, grouped_folds

SHAPES = [(200, 20, 10), (103, 7, 30), (60, 90, 12)]
Score = Callable[[np.ndarray, np.ndarray], float]


def rows(n: int = 103, p: int = 7, q: int = 5) -> tuple[np.ndarray, np.ndarray]:
    x, y = correlated_rows(n, p, q)
    return x.numpy(), y.numpy()


def variance_weighted(y: np.ndarray, predicted: np.ndarray) -> float:
    return float(r2_score(y, predicted, multioutput="variance_weighted"))


def by_scikit_learn(
    x: np.ndarray, y: np.ndarray, fold: np.ndarray, fit: Any = None, score: Score = variance_weighted
) -> float:
    """The mean over folds; `fit` makes an estimator, by default a ridge that chooses among our penalties."""
    length = np.sum((x - x.mean(0)) ** 2)
    scores = []
    for held in np.unique(fold):
        train, test = fold != held, fold == held
        inner = {"cv": PredefinedSplit(fold[train]), "scoring": "neg_mean_squared_error"}
        model = RidgeCV([s * length for s in STRENGTHS], **inner) if fit is None else fit()
        scores.append(score(y[test], model.fit(x[train], y[train]).predict(x[test])))
    return float(np.mean(scores, axis=0)) if np.ndim(scores) == 1 else np.mean(scores, axis=0)


def folds_of(n: int, folds: int = 5, seed: int = 0) -> np.ndarray:
    return dealt_folds(torch.arange(n), folds, seed).numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ridge_with_a_chosen_penalty(shape: tuple[int, int, int]) -> None:
    x, y = rows(*shape)
    for folds, seed in ((5, 0), (3, 1)):
        expected = by_scikit_learn(x, y, folds_of(len(x), folds, seed))
        assert sosie.measure("predictivity", x, y, folds=folds, seed=seed) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_regressions(shape: tuple[int, int, int]) -> None:
    x, y = rows(*shape)
    fold, length = folds_of(len(x)), np.sum((x - x.mean(0)) ** 2)
    for options, fit in (
        ({"fit": "linear"}, LinearRegression),
        ({"strength": 0.01}, lambda: Ridge(0.01 * length)),
        ({"fit": "pls", "components": 3}, lambda: PLSRegression(3, scale=False, tol=1e-14, max_iter=10_000)),
    ):
        if fit is LinearRegression and shape[1] > shape[0] and "tol" not in LinearRegression().get_params():
            continue  # scikit-learn before 1.7 divides by the direction that centring empties
        expected = by_scikit_learn(x, y, fold, fit)
        assert sosie.measure("predictivity", x, y, **options) == pytest.approx(expected, abs=1e-6), options  # type: ignore[arg-type]


def test_as_many_components_as_directions_are_a_linear_regression() -> None:
    x, y = rows()
    linear = sosie.measure("predictivity", x, y, fit="linear")
    assert sosie.measure("predictivity", x, y, fit="pls") == pytest.approx(linear, abs=1e-9)


def test_scores() -> None:
    x, y = rows(103, 7, 6)
    fold = folds_of(len(x))
    expected = by_scikit_learn(
        x, y, fold, score=lambda a, b: explained_variance_score(a, b, multioutput="variance_weighted")
    )
    assert sosie.measure("predictivity", x, y, score="explained_variance") == pytest.approx(expected, abs=1e-9)
    each = by_scikit_learn(x, y, fold, score=lambda a, b: [pearsonr(*pair)[0] for pair in zip(a.T, b.T, strict=True)])  # type: ignore[arg-type, return-value]
    assert sosie.measure("predictivity", x, y, score="pearson") == pytest.approx(np.median(each), abs=1e-9)


def test_folds_are_equal_and_seeded() -> None:
    for n in (100, 103):
        sizes = np.bincount(folds_of(n, 4))
        assert sizes.max() - sizes.min() <= 1
    assert (folds_of(100, seed=0) != folds_of(100, seed=1)).mean() > 0.5
    np.testing.assert_array_equal(dealt_folds(torch.arange(37, 90), 5, 0), folds_of(100)[37:90])


def test_groups_stay_together() -> None:
    x, y = rows()
    groups = np.random.default_rng(0).integers(0, 23, len(x))
    fold = grouped_folds(groups, 5, 0)
    assert all(len(set(fold[groups == group])) == 1 for group in set(groups))
    assert np.bincount(fold).min() > 15
    value = sosie.measure("predictivity", x, y, groups=[f"subject {group}" for group in groups], folds=5)
    named = grouped_folds(np.array([f"subject {group}" for group in groups]), 5, 0)
    assert value == pytest.approx(by_scikit_learn(x, y, named), abs=1e-9)
    assert value == sosie.measure("predictivity", x, y, split=named, groups=groups)
    assert sosie.measure("predictivity", x, y, groups=torch.from_numpy(groups)) == pytest.approx(
        by_scikit_learn(x, y, fold), abs=1e-9
    )


def test_noise_is_divided_out() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 6))
    repetitions = (x @ random.normal(size=(6, 8)))[:, None] + 2.5 * random.normal(size=(400, 6, 8))
    y = repetitions.mean(1)
    for score in ("r2", "explained_variance", "pearson"):
        plain = sosie.measure("predictivity", x, y, score=score)
        corrected = sosie.measure("predictivity", x, y, score=score, repetitions=repetitions)
        assert plain < 0.93
        assert corrected == pytest.approx(1, abs=0.03), score


def test_noise_correction_by_its_formula() -> None:
    x, y = rows()
    noisy = np.stack([y + 0.1, y - 0.1], 1) + np.random.default_rng(0).normal(size=(len(y), 2, y.shape[1]))
    y = noisy.mean(1)
    noise = noisy.var(1, ddof=1).mean(0) / 2
    plain = sosie.measure("predictivity", x, y)
    share = 1 - noise.sum() / y.var(0).sum()
    assert sosie.measure("predictivity", x, y, repetitions=noisy) == pytest.approx(plain / share, abs=1e-9)


# In one pass


def batches(x: np.ndarray, size: int) -> Iterator[torch.Tensor]:
    return iter(torch.from_numpy(x).split(size))


def test_one_pass_is_the_measure_whatever_the_batches() -> None:
    x = np.random.default_rng(0).normal(size=(503, 6))
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(6, 9), nn.ReLU()).double() for _ in range(2))
    with torch.no_grad():
        expected = sosie.measure("predictivity", a(torch.from_numpy(x)), b(torch.from_numpy(x)))
    for size in (503, 64, 7):
        c = sosie.compare(a, b, list(batches(x, size)), sites="1", measures=["predictivity", "linear_cka"])
        assert c.matrix("predictivity")[0, 0] == pytest.approx(expected, abs=1e-9)
        assert "moments of all 503 rows in 5 folds" in c["predictivity"].statistic


def test_positions_of_one_input_stay_in_one_fold() -> None:
    torch.manual_seed(0)
    images = torch.randn(40, 3, 4, 4)
    a, b = (nn.Conv2d(3, 5, 3, padding=1) for _ in range(2))
    c = sosie.compare(a, b, images.split(9), rows="positions", measures="predictivity")
    with torch.no_grad():
        x, y = (net(images).movedim(1, -1).reshape(-1, 5).double() for net in (a, b))
    by_image = np.repeat(folds_of(40), 16)
    expected = sosie.measure("predictivity", x, y, split=by_image)
    assert c.matrix()[0, 0] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(MemoryError, match=r"keeps the rows of an input in one fold.*raise memory="):
        sosie.compare(a, b, images, rows="positions", measures="predictivity", memory=1000)


def test_few_rows_and_little_memory_read_the_rows() -> None:
    x, y = rows(60, 90, 12)
    expected = sosie.measure("predictivity", x, y)
    for memory in (None, "200kB"):
        c = sosie.compare({"a": x}, {"b": y}, measures="predictivity", memory=memory)
        assert c.matrix()[0, 0] == pytest.approx(expected, abs=1e-9)
        assert "all 60 rows" in c["predictivity"].statistic


def test_parts_of_the_data_merge(tmp_path: Path) -> None:
    x = torch.from_numpy(rows(90)[0])
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(7, 4), nn.Tanh()).double() for _ in range(2))
    paths = []
    for start, stop in ((0, 40), (40, 90)):
        paths.append(tmp_path / f"{start}.safetensors")
        part = DataPart([x[start:stop]], start)
        sosie.compare(a, b, part, sites="1", measures="predictivity", resume=paths[-1])
    with torch.no_grad():
        expected = sosie.measure("predictivity", a(x), b(x))
    assert sosie.compare(*paths).matrix()[0, 0] == pytest.approx(expected, abs=1e-9)
    assert 0.1 < expected < 0.9


def test_chance_and_interval() -> None:
    x, y = rows(400)
    c = sosie.compare({"a": x}, {"b": y}, measures="predictivity", null="permutation", draws=40, interval=True)
    (row,) = c.rows()
    assert row["low"] < row["value"] < row["high"]
    assert row["null"] < 0.05 < row["value"]
    assert row["p"] == pytest.approx(1 / 41)


def in_clips(sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """A clip of each size up to this, in mixed order, and the folds that scikit-learn deals them to."""
    clips = np.random.default_rng(0).permutation(np.repeat(np.arange(sizes), np.arange(1, sizes + 1)))
    fold = np.empty(len(clips), dtype=int)
    for number, (_, test) in enumerate(GroupKFold(5).split(clips, groups=clips)):
        fold[test] = number
    return clips, fold


@pytest.mark.parametrize(("sizes", "p"), [(30, 6), (14, 120)])
def test_groups_of_inputs_are_held_out_together_in_a_comparison(sizes: int, p: int, tmp_path: Path) -> None:
    clips, fold = in_clips(sizes)
    x, y = rows(len(clips), p, 5)
    expected = by_scikit_learn(x, y, fold)
    names = [f"clip {clip:02}" for clip in clips]
    for options in ({}, {"memory": "500kB"}, {"max_rows": len(clips)}, {"resume": tmp_path / "sums.safetensors"}):
        c = sosie.compare({"a": x}, {"b": y}, measures="predictivity", groups=names, **options)
        assert c.matrix()[0, 0] == pytest.approx(expected, abs=1e-9), options
        assert c.provenance["settings"]["groups"] == f"{sizes} of {len(clips)} inputs"
    assert sosie.compare(tmp_path / "sums.safetensors").matrix()[0, 0] == pytest.approx(expected, abs=1e-9)
    assert abs(sosie.compare({"a": x}, {"b": y}, measures="predictivity").matrix()[0, 0] - expected) > 1e-3
    some = sosie.compare({"a": x}, {"b": y}, measures="predictivity", groups=clips, max_rows=80)
    assert some.matrix()[0, 0] == pytest.approx(
        sosie.measure("predictivity", x[:80], y[:80], groups=clips[:80]), abs=1e-9
    )


def test_rows_of_groups_have_no_interval_and_no_chance() -> None:
    clips, _ = in_clips(20)
    x, y = rows(len(clips))
    for names in ("predictivity", "linear_cka"):
        options = {"measures": ["predictivity", names][: 2 - (names == "predictivity")], "interval": True}
        found = sosie.compare({"a": x}, {"b": y}, groups=clips, null="permutation", draws=20, **options)
        for row in found.rows():
            assert (row["low"], row["null"], row["p"]) == (None, None, None)
            assert any("inputs come in groups" in caveat for caveat in row["caveats"])


def test_groups_of_inputs_with_several_rows_and_in_parts(tmp_path: Path) -> None:
    clips, fold = in_clips(12)
    torch.manual_seed(0)
    images = torch.randn(len(clips), 3, 4, 4)
    a, b = (nn.Conv2d(3, 5, 3, padding=1) for _ in range(2))
    with torch.no_grad():
        x, y = (net(images).movedim(1, -1).reshape(-1, 5).double() for net in (a, b))
    expected = pytest.approx(sosie.measure("predictivity", x, y, split=np.repeat(fold, 16)), abs=1e-6)
    options: dict[str, Any] = {"rows": "positions", "measures": "predictivity", "groups": torch.from_numpy(clips)}
    assert sosie.compare(a, b, images.split(9), **options).matrix()[0, 0] == expected
    paths = [tmp_path / f"{part}.safetensors" for part in (1, 2)]
    for path, start, stop in zip(paths, (0, 30), (30, None), strict=True):
        sosie.compare(a, b, DataPart([images[start:stop]], start), resume=path, **options)
    assert sosie.compare(*paths).matrix()[0, 0] == expected
    paths[1].unlink()
    sosie.compare(a, b, DataPart([images[30:]], 30), resume=paths[1], **options | {"groups": clips[::-1].copy()})
    with pytest.raises(ValueError, match="not of the same comparison: the settings are not the same"):
        sosie.compare(*paths)


# Bad input


def test_bad_input() -> None:
    x, y = rows(20)

    def value(**options: Any) -> float:
        return sosie.measure("predictivity", x, y, **options)

    for options, message in (
        ({"folds": 15}, r"fold \d+ of 15 has 1 of 20 rows, and each needs at least 2: take fewer folds, or more rows"),
        ({"folds": 1}, "folds must be a whole number of at least 2"),
        ({"folds": 2}, "at least 3 folds, got 2: take more, or give a strength"),
        ({"strength": 0.0}, "strength must be a number above 0"),
        ({"fit": "lasso"}, "fit must be one of 'ridge', 'linear', 'pls'"),
        ({"score": "mse"}, "score must be one of"),
        ({"fit": "pls", "components": 0}, "components must be a whole number"),
        ({"groups": [0, 1] * 10}, "2 groups cannot be in 5 folds"),
        ({"groups": [0, 1]}, r"groups must have one label for each of 20 rows, got shape \(2,\)"),
        ({"split": [1] * 20}, "at least 2 folds, got 1"),
        (
            {"split": [0, 1, 2, 3] * 5, "groups": [*range(19), 0]},
            "1 of 19 groups are in more than one fold of split: 0",
        ),
        ({"split": [0] * 10 + [1] * 9 + [2]}, "fold 2 of 3 has 1 of 20 rows"),
        ({"groups": [None, "a"] * 10}, "groups must be all numbers or all text, none missing, got NoneType, str"),
        ({"groups": [np.nan, *range(19)]}, "none missing"),
        ({"repetitions": np.stack([y, y, y], 1)[:19]}, r"repetitions of y \(20, 5\) must be \(n, r, q\)"),
        ({"repetitions": y[:, None]}, "with r at least 2"),
        ({"repetitions": np.stack([y, y[::-1]], 1)}, "must be the mean of its repetitions"),
        ({"repetitions": np.stack([y, -y], 1) * 9 + y[:, None]}, "noise leaves nothing to predict"),
    ):
        with pytest.raises(ValueError, match=message):
            value(**options)
    with pytest.raises(TypeError, match="linear_cka holds no rows out: it takes no groups and no split"):
        sosie.measure("linear_cka", x, y, groups=[1] * 20, split=[1] * 20)
    constant = np.where(np.arange(20)[:, None] < 5, 0.0, y)
    with pytest.raises(ValueError, match="y does not vary over the rows of fold 0"):
        sosie.measure("predictivity", x, constant, split=np.arange(20) // 5)
    with pytest.raises(ValueError, match="y does not vary over the rows of fold 0"):
        sosie.measure("predictivity", x, constant + 0.1, split=np.arange(20) // 5)  # but for rounding
    with pytest.raises(TypeError, match="split is the fold of each row already: leave folds out"):
        value(split=[0, 1, 2, 3] * 5, folds=7)


def test_options_change_the_facts_they_change() -> None:
    x, y = rows(60)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
    for score in ("r2", "pearson"):
        measure = predictivity.using(score=score) if score != "r2" else predictivity
        apart = abs(sosie.measure(measure, x, y @ turn) - sosie.measure(measure, x, y))
        assert (apart < 1e-9) == ("rotation" in measure.invariant), score
    assert sosie.measure("predictivity", x, x, strength=1.0) < 0.99
    assert (predictivity.same, predictivity.using(strength=1.0).same) == (1, None)


def test_bad_input_to_a_comparison() -> None:
    x, y = rows(20)
    with pytest.raises(ValueError, match="the same folds in one comparison, got folds=4, seed=0 and folds=5, seed=0"):
        sosie.compare({"a": x}, {"b": y}, measures=["predictivity", "predictivity(folds=4)"])
    for groups, message in (
        ([1] * 19, r"one label for each input, got 19 for 20"),
        (range(21), "one label for each input, got 21 for 20"),
        ([[1, 2]] * 20, r"one label for each input, got shape \(20, 2\)"),
        ([1, 2] * 10, "2 groups cannot be in 5 folds"),
    ):
        with pytest.raises(ValueError, match=message):
            sosie.compare({"a": x}, {"b": y}, measures="predictivity", groups=groups)
    data = torch.from_numpy(x).split(5)
    for labels, message in ((19, "got 19 for 20 or more"), (21, "got 21 for 20")):
        with pytest.raises(ValueError, match=message):  # of data of unknown length
            sosie.compare(*[nn.Linear(7, 3).double()] * 2, iter(data), measures="predictivity", groups=range(labels))
    with pytest.raises(TypeError, match="linear_cka hold no rows out: leave groups out"):
        sosie.compare({"a": x}, {"b": y}, measures="linear_cka", groups=range(20))
    c = sosie.compare({"a": x}, {"b": y}, measures="predictivity(folds=15)")
    assert any("of 15 has 1 of 20 rows" in caveat for caveat in c.rows()[0]["caveats"])


def test_rows_of_float32_with_a_gradient() -> None:
    x, y = (torch.from_numpy(side) for side in rows(60))
    found = predictivity.of(x.float().requires_grad_(), y.float())
    assert float(found.detach()) == pytest.approx(sosie.measure("predictivity", x, y), abs=1e-5)


@pytest.mark.parametrize(("n", "p"), [(60, 9), (40, 70)])
def test_a_ridge_of_hardly_any_penalty_is_the_linear_fit(n: int, p: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(n, p)) * np.linspace(1, 3, p)
    x[:, 1] = 2 * x[:, 0]
    y = x @ random.normal(size=(p, 4)) + random.normal(size=(n, 4))
    linear = sosie.measure("predictivity", x, y, fit="linear")
    for strength in (1e-17, 1e-12, 3e-10):
        assert sosie.measure("predictivity", x, y, strength=strength) == pytest.approx(linear, abs=1e-5)
