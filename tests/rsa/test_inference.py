"""Models of dissimilarities held against subjects: by their definitions in NumPy and SciPy, and by simulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from scipy.stats import kendalltau, rankdata, spearmanr, ttest_1samp, ttest_rel

from sosie.rsa import Model, RDMs, compare_rdms, evaluate, noise_ceiling
from sosie.rsa.inference import _folds, _variance, _vectors, corrected

Array = np.ndarray


def made(x: Array, names: str = "s") -> RDMs:
    return RDMs.of({f"{names}{k}": rows for k, rows in enumerate(x)}, "squared_euclidean")


def scene(stimuli: int = 12, subjects: int = 6, noise: float = 1.0, seed: int = 0) -> tuple[RDMs, RDMs]:
    """Three models, of which subjects see the first with noise, and half of the second."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(3, stimuli, 8))
    true = np.concatenate([x[0], 0.7 * x[1]], 1)
    return made(x, "m"), made(true + noise * random.normal(size=(subjects, *true.shape)))


def covariance(order: Array) -> tuple[Array, Array]:
    """V of squared distances of these rows by its definition, (C Cᵀ)², and which pairs are no copies."""
    i, j = np.triu_indices(len(order), 1)
    contrast = np.eye(len(order))[i] - np.eye(len(order))[j]
    kept = order[i] != order[j]
    return ((contrast @ contrast.T) ** 2)[np.ix_(kept, kept)], kept


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.sqrt(a @ a * (b @ b)))


@pytest.mark.parametrize("compare", ["whitened_cosine", "whitened_pearson"])
def test_pairs_of_copies_are_left_out_and_the_rest_has_its_own_covariance(compare: str) -> None:
    models, subjects = scene(7)
    order = np.array([0, 3, 3, 1, 6, 3, 1])
    v, kept = covariance(order)
    i, j = np.triu_indices(7, 1)
    a, b = (rdms.matrices[0][order[i], order[j]][kept] for rdms in (models, subjects))
    if compare == "whitened_pearson":
        a, b = a - a.mean(), b - b.mean()
    inverse = np.linalg.inv(v)
    expected = a @ inverse @ b / np.sqrt(a @ inverse @ a * (b @ inverse @ b))
    one, other = (_vectors(torch.from_numpy(rdms.matrices[:1]), order, compare)[0] for rdms in (models, subjects))
    assert float(one @ other) == pytest.approx(expected, abs=1e-12)


# The noise ceiling


def ranks(values: Array) -> Array:
    return rankdata(values, axis=-1)


def unit(values: Array) -> Array:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def centred(values: Array) -> Array:
    return values - values.mean(-1, keepdims=True)


def tau_a(a: Array, b: Array) -> float:
    i, j = np.triu_indices(len(a), 1)
    return float(np.mean(np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])))


CEILINGS: dict[str, tuple[Callable[[Array], Array], Callable[[Array, Array], float]]] = {
    "cosine": (unit, cosine),
    "pearson": (lambda d: unit(centred(d)), lambda a, b: np.corrcoef(a, b)[0, 1]),
    "spearman": (ranks, lambda a, b: spearmanr(a, b)[0]),
    "rho_a": (ranks, lambda a, b: 12 * centred(ranks(a)) @ centred(ranks(b)) / (len(a) ** 3 - len(a))),
    "kendall": (ranks, lambda a, b: tau_a(a, b)),
    "kendall_b": (ranks, lambda a, b: kendalltau(a, b)[0]),
}


@pytest.mark.parametrize("compare", CEILINGS)
def test_the_noise_ceiling_by_its_definition(compare: str) -> None:
    """Nili et al. 2014: the mean similarity to the mean of all, and of the others."""
    _, subjects = scene()
    pool, similar = CEILINGS[compare]
    d = subjects.values
    upper = np.mean([similar(row, pool(d).mean(0)) for row in d])
    lower = np.mean([similar(d[k], pool(np.delete(d, k, 0)).mean(0)) for k in range(len(d))])
    assert noise_ceiling(subjects, compare) == pytest.approx((lower, upper), abs=1e-12)
    assert lower < upper


@pytest.mark.parametrize("compare", [name for name in CEILINGS if name != "cosine"])
def test_a_mean_in_which_subjects_cancel_predicts_nothing(compare: str) -> None:
    pool, similar = CEILINGS[compare]
    true, subjects = scene()
    for values in (true.values[0], np.random.default_rng(0).normal(size=true.values.shape[1])):
        opposite = np.stack([values, values.max() + 0.1 - values])
        expected = compare_rdms(RDMs(opposite), RDMs(opposite), compare)[0, 1], 0
        assert noise_ceiling(RDMs(opposite), compare) == pytest.approx(expected, abs=1e-12)
        d = np.vstack([opposite, subjects.values[1]])
        to_others = [similar(d[k], pool(np.delete(d, k, 0)).mean(0)) for k in range(2)]
        assert noise_ceiling(RDMs(d), compare)[0] == pytest.approx(sum(to_others) / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("method", "compare"),
    [("cosine", "cosine"), ("corr", "pearson"), ("spearman", "spearman"), ("rho-a", "rho_a"), ("tau-a", "kendall")],
)
@pytest.mark.filterwarnings("ignore")
def test_rsatoolbox_has_the_same_ceiling(method: str, compare: str) -> None:
    """But for whitened comparators, for which it makes the RDMs equally long before it whitens them."""
    rsatoolbox = pytest.importorskip("rsatoolbox", reason="the package rsatoolbox is not installed")
    _, subjects = scene()
    theirs = rsatoolbox.inference.boot_noise_ceiling(rsatoolbox.rdm.RDMs(np.array(subjects.values)), method=method)
    assert noise_ceiling(subjects, compare) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("compare", ["pearson", "whitened_pearson", "spearman", "cosine"])
def test_the_ceiling_holds_the_true_model_and_no_other(compare: str) -> None:
    """Subjects are the true RDM and noise of their own: means of 40 experiments."""
    random = np.random.default_rng(1)
    found = []
    for _ in range(40):
        true = made(random.normal(size=(2, 15, 10)))
        subjects = RDMs(true.values[0] + 8 * random.normal(size=(6, true.values.shape[1])))
        found.append([*noise_ceiling(subjects, compare), *compare_rdms(true, subjects, compare).mean(1)])
    lower, upper, right, wrong = np.mean(found, 0)
    assert lower < right < upper
    assert wrong < lower


# Fitted models


@pytest.mark.parametrize("compare", ["cosine", "pearson", "whitened_cosine", "whitened_pearson"])
def test_weights_are_generalised_least_squares_with_no_negative_ones(compare: str) -> None:
    models, subjects = scene()
    v, _ = covariance(np.arange(12))
    white = np.linalg.inv(np.linalg.cholesky(v)) if compare.startswith("whitened") else np.eye(len(v))
    centre = centred if compare.endswith("pearson") else lambda d: d
    parts, target = centre(models.values) @ white.T, unit(centre(subjects.values) @ white.T).mean(0)
    expected = unit(nnls(parts.T, target)[0])
    found = Model(models, "weighted").weights(subjects, compare)
    assert unit(found) == pytest.approx(expected, abs=1e-9)
    best = compare_rdms(RDMs(found[None] @ models.values), subjects, compare).mean()
    for step in np.random.default_rng(0).normal(size=(50, 3)) * found.max() * 0.1:
        other = np.maximum(found + step, 0)
        assert compare_rdms(RDMs(other[None] @ models.values), subjects, compare).mean() <= best + 1e-12


def test_weights_are_those_that_the_data_were_made_of() -> None:
    models, _ = scene()
    subjects = RDMs(np.array([[2.0, 0.5, 0], [2.0, 0.5, 0]]) @ models.values)
    for compare in ("cosine", "whitened_pearson", "spearman", "kendall"):
        assert unit(Model(models, "weighted").weights(subjects, compare)) == pytest.approx(
            unit(np.array([2, 0.5, 0])), abs=1e-9
        )
    opposite = RDMs(50 - models.values[:1])
    assert Model(models, "weighted").weights(opposite, "pearson")[0] == 0
    assert list(Model(models, "selected").weights(subjects, "pearson")) == [1, 0, 0]


def test_folds_share_nothing_and_keep_copies_together() -> None:
    order = np.array([4, 0, 4, 2, 7, 7, 1, 3])
    tested = []
    for train, test in _folds(order, 3, np.arange(8)[::-1]):
        assert not set(train) & set(test)
        assert sorted([*train, *test]) == sorted(order)
        tested += list(test)
    assert sorted(tested) == sorted(order)


def test_values_of_folds_by_hand() -> None:
    """The seeded halves of the stimuli: a model is fitted to one and evaluated on the other."""
    models, subjects = scene()
    found = evaluate(
        [models["m1"], Model(models, "weighted", "sum")], subjects, "pearson", folds_stimuli=2, draws=20, seed=3
    )
    halves = np.array_split(np.argsort(np.random.default_rng(3).permutation(12)), 2)
    fixed, fitted = [], []
    for test in halves:
        train, test = ([str(k) for k in part] for part in (sorted(set(range(12)) - set(test)), sorted(test)))
        weights = Model(models.select(train), "weighted").weights(subjects.select(train), "pearson")
        predicted = RDMs(weights[None] @ models.values).select(test)
        fixed.append(compare_rdms(models["m1"].select(test), subjects.select(test), "pearson"))
        fitted.append(compare_rdms(predicted, subjects.select(test), "pearson"))
    assert found.of_subjects == pytest.approx(np.concatenate([np.mean(fixed, 0), np.mean(fitted, 0)]), abs=1e-9)
    ceilings = [noise_ceiling(subjects.select([str(k) for k in sorted(test)]), "pearson") for test in halves]
    assert found.ceiling == pytest.approx(np.mean(ceilings, 0), abs=1e-9)


def test_folds_of_subjects_leave_them_out() -> None:
    models, subjects = scene()
    found = evaluate(
        [Model(models, "weighted", "sum")], subjects, "cosine", folds_subjects=6, draws=20, bootstrap="stimuli"
    )
    for k, name in enumerate(subjects.names):
        others = subjects[[other for other in subjects.names if other != name]]
        weights = Model(models, "weighted").weights(others, "cosine")
        value = compare_rdms(RDMs(weights[None] @ models.values), subjects[name], "cosine")
        assert found.of_subjects[0, k] == pytest.approx(value[0, 0], abs=1e-12)


def test_a_model_of_noise_explains_nothing_once_it_is_cross_validated() -> None:
    random = np.random.default_rng(0)
    fitted, honest = [], []
    for seed in range(30):
        noise, subjects = made(random.normal(size=(8, 12, 6)), "m"), made(random.normal(size=(4, 12, 6)))
        weights = Model(noise, "weighted").weights(subjects, "pearson")
        fitted.append(compare_rdms(RDMs(weights[None] @ noise.values), subjects, "pearson").mean())
        found = evaluate([Model(noise, "weighted", "sum")], subjects, "pearson", folds_stimuli=2, draws=20, seed=seed)
        honest.append(found.values[0])
    assert np.mean(fitted) > 0.1
    assert abs(np.mean(honest)) < 2.6 * np.std(honest) / np.sqrt(30)


# The bootstrap


def test_the_bootstrap_over_subjects_is_the_t_test() -> None:
    """The variance of a mean is s²/n: SciPy's t-tests, but for the error of 4,000 draws."""
    models, subjects = scene(noise=3)
    found = evaluate(models, subjects, "pearson", bootstrap="subjects", draws=4000, correction="none")
    values = found.of_subjects
    assert found.values == pytest.approx(compare_rdms(models, subjects, "pearson").mean(1))
    assert found.errors == pytest.approx(values.std(1, ddof=1) / np.sqrt(6), rel=0.04)  # 3.5 σ of a deviation
    assert found.p_zero == pytest.approx(ttest_1samp(values, 0, axis=1, alternative="greater").pvalue, rel=0.3)
    assert found.p_pairs[0, 1] == pytest.approx(ttest_rel(values[0], values[1]).pvalue, rel=0.3)
    low, high = ttest_1samp(values[0], 0).confidence_interval()
    assert (found.low[0], found.high[0]) == pytest.approx((low, high), abs=0.01)


def test_the_bootstrap_over_stimuli_draw_by_draw() -> None:
    models, subjects = scene()
    found = evaluate(models, subjects, "pearson", bootstrap="stimuli", draws=50, seed=5)
    random, (i, j) = np.random.default_rng(5), np.triu_indices(12, 1)
    sample = []
    for _ in range(50):
        order = random.choice(12, 12)
        kept = order[i] != order[j]
        m, s = (rdms.matrices[:, order[i], order[j]][:, kept] for rdms in (models, subjects))
        sample.append(np.corrcoef(m, s)[:3, 3:].mean(1))
    assert found.errors == pytest.approx(np.std(sample, axis=0, ddof=1) * np.sqrt(12 / 11), abs=1e-12)
    assert found.draws == 50


def experiment(random: np.random.Generator, stimuli: int, subjects: int) -> tuple[RDMs, RDMs]:
    """New stimuli and new subjects, each of whom mixes what is there in a way of their own, with noise."""
    x = random.normal(size=(stimuli, 12))
    mixed = x @ (np.eye(12) + 0.5 * random.normal(size=(subjects, 12, 12)))
    return made(np.stack([x[:, :6], x[:, 3:9]]), "m"), made(mixed + 1.5 * random.normal(size=mixed.shape))


def test_intervals_hold_the_mean_over_new_stimuli_and_new_subjects() -> None:
    """60 experiments and two models: 120 intervals of 95 %, of which 107 to 120 hold it (99 %, binomial)."""
    random = np.random.default_rng(1)
    true = np.mean([compare_rdms(*experiment(random, 16, 8), "cosine").mean(1) for _ in range(1500)], 0)
    held, apart = 0, 0
    for seed in range(60):
        found = evaluate(*experiment(random, 16, 8), "cosine", draws=50, seed=seed)
        held += int(((found.low <= true) & (true <= found.high)).sum())
        apart += bool(found.p_pairs[0, 1] < 0.05)
    assert held >= 107
    assert apart <= 8  # the models are equally good; 5 % of 60 are 3, and 99 % of draws have at most 8


def test_the_variance_over_both_counts_noise_once() -> None:
    """S = 4, P = 9 and N = 2 of many stimuli and subjects; and bounds, as no part is larger than the whole."""
    many = {"stimuli": 10**9, "subjects": 10**9}
    assert _variance({"stimuli": 4 + 2, "subjects": 9 + 2, "both": 4 + 9 + 3 * 2}, many) == pytest.approx(15)
    assert _variance({"stimuli": 6, "subjects": 11, "both": 40}, many) == pytest.approx(11)
    assert _variance({"stimuli": 6}, {"stimuli": 4, "subjects": 9}) == pytest.approx(8)


def test_resampling_one_of_two_is_too_narrow() -> None:
    """Who forgets that subjects differ, too, has an interval that is too short."""
    random = np.random.default_rng(1)
    errors = {
        kind: np.mean(
            [
                evaluate(*experiment(np.random.default_rng(seed), 16, 8), "cosine", draws=50, bootstrap=kind).errors
                for seed in range(10)
            ]
        )
        for kind in ("both", "stimuli", "subjects")
    }
    values = [compare_rdms(*experiment(random, 16, 8), "cosine").mean(1) for _ in range(500)]
    assert errors["both"] == pytest.approx(np.std(values, axis=0).mean(), rel=0.2)
    assert max(errors["stimuli"], errors["subjects"]) < errors["both"]


@pytest.mark.parametrize("compare", ["spearman", "rho_a", "kendall", "kendall_b", "whitened_cosine"])
def test_every_comparator_is_evaluated(compare: str) -> None:
    models, subjects = scene(12, 4)
    found = evaluate([models, Model(models, "weighted", "sum")], subjects, compare, folds_stimuli=2, draws=20)
    assert found.names == ("m0", "m1", "m2", "sum")
    assert np.isfinite(found.errors).all()
    again = evaluate([models, Model(models, "weighted", "sum")], subjects, compare, folds_stimuli=2, draws=20)
    assert np.array_equal(found.errors, again.errors)
    alone = evaluate(Model(models, "weighted", "sum"), subjects, compare, folds_stimuli=2, draws=20)
    assert alone.values == pytest.approx(found.values[3:])
    whole = evaluate(models, subjects, compare, draws=20)
    assert whole.values == pytest.approx(compare_rdms(models, subjects, compare).mean(1), abs=1e-12)


# What is said of the models


def test_corrections_by_hand() -> None:
    p = np.array([0.01, 0.04, 0.03, 0.5])
    assert corrected(p, "none") == pytest.approx(p)
    assert corrected(p, "bonferroni") == pytest.approx([0.04, 0.16, 0.12, 1])
    assert corrected(p, "holm") == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert corrected(p, "fdr") == pytest.approx([0.04, 4 * 0.04 / 3, 4 * 0.04 / 3, 0.5])


def test_the_evaluation_is_told_and_seen() -> None:
    pytest.importorskip("matplotlib")
    models, subjects = scene(30, 8)
    found = evaluate(models, subjects, "pearson", draws=100)
    rows, pairs = found.rows(), found.pairs()
    assert [row["model"] for row in rows] == ["m0", "m1", "m2"]
    assert rows[0]["low"] < rows[0]["value"] < rows[0]["high"]
    assert [(pair["model_a"], pair["model_b"]) for pair in pairs] == [("m0", "m1"), ("m0", "m2"), ("m1", "m2")]
    assert pairs[1]["difference"] == pytest.approx(rows[0]["value"] - rows[2]["value"])
    assert rows[2]["p_ceiling"] < 0.05 < rows[2]["p_zero"]
    assert rows[0]["p_zero"] < 0.05
    axes = found.plot().axes[0]
    assert [bar.get_height() for bar in axes.containers[0]] == pytest.approx(list(found.values))
    assert "noise ceiling" in repr(found)
    assert "<td" in found._repr_html_()


def test_one_subject_has_no_ceiling() -> None:
    models, subjects = scene()
    found = evaluate(models, subjects["s0"], "pearson", draws=50)
    assert (found.bootstrap, found.ceiling, found.p_ceiling) == ("stimuli", None, None)
    assert "ceiling" not in repr(found)
    with pytest.raises(ValueError, match="at least 2 subjects, or seeds, got 1"):
        noise_ceiling(subjects["s0"])
    with pytest.raises(ValueError, match="bootstrap over subjects needs at least 3 of them, got 1"):
        evaluate(models, subjects["s0"], bootstrap="both")


def test_what_cannot_be_evaluated_is_said() -> None:
    models, subjects = scene()
    weighted = Model(models, "weighted", "sum")
    with pytest.raises(ValueError, match="different stimuli"):
        evaluate(scene(10)[0], subjects)
    with pytest.raises(ValueError, match="sum is fitted, and would be evaluated on what it is fitted to"):
        evaluate([weighted], subjects)
    with pytest.raises(ValueError, match="a fixed model is one RDM, got 3"):
        Model(models)
    with pytest.raises(ValueError, match="fit must be one of"):
        Model(models, "weigthed")
    with pytest.raises(ValueError, match="names of their own"):
        evaluate([models, models["m0"]], subjects)
    with pytest.raises(ValueError, match="no models"):
        evaluate([], subjects)
    with pytest.raises(
        ValueError, match="folds_stimuli must be a whole number from 2 to 2, got 3: in a bootstrap draw"
    ):
        evaluate([weighted], subjects, folds_stimuli=3)
    few = [f"{k}" for k in range(10)]
    with pytest.raises(ValueError, match="at least 12 stimuli, got 10: use folds_subjects="):
        evaluate(models.select(few), subjects.select(few), folds_stimuli=2)
    with pytest.raises(ValueError, match="too few different stimuli"):
        evaluate(models.select(few[:3]), subjects.select(few[:3]), draws=20)
    with pytest.raises(ValueError, match="folds_subjects must be a whole number from 2 to 6"):
        evaluate([weighted], subjects, folds_subjects=7)
    with pytest.raises(ValueError, match="bootstrap must be one of"):
        evaluate(models, subjects, bootstrap="models")
    one = RDMs((np.arange(66) == 40).astype(float)[None], names=("one",))
    with pytest.raises(ValueError, match=r"more than 25% .* a model that is the same for most pairs"):
        evaluate(one, subjects, "cosine", bootstrap="stimuli", draws=20)
    with pytest.raises(ValueError, match="one is the same for all test stimuli of a fold"):
        evaluate(one, subjects, "pearson", folds_stimuli=2, draws=20)
    flat = RDMs(np.ones((1, 66)), names=("flat",))
    with pytest.raises(ValueError, match="equally far apart"):
        evaluate(flat, subjects, "pearson")
    assert evaluate(flat, subjects, "cosine", draws=20).values[0] > 0
