"""Measures of outputs against scikit-learn, SciPy, counting by hand, and every shuffle of the pairing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax
from scipy.stats import pearsonr

import sosie
from sosie.measures import MEASURES, chance_of
from sosie.stats import OutputSums

RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 5, 400)
A, B = (np.where(RANDOM.random(400) < right, LABELS, RANDOM.integers(0, 5, 400)) for right in (0.8, 0.6))
LOGITS_A, LOGITS_B = RANDOM.normal(size=(400, 5)), 3 * RANDOM.normal(size=(400, 5))


def test_agreement_and_its_complement() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    agreement = sosie.measure("agreement", A, B)
    assert agreement == pytest.approx(metrics.accuracy_score(A, B), abs=1e-15)
    assert sosie.measure("disagreement", A, B) == pytest.approx(1 - agreement, abs=1e-15)
    assert sosie.measure("churn", A, B) == sosie.measure("disagreement", A, B)


def test_the_score_of_agreement_is_cohens_kappa_of_the_predictions() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    found = sosie.compare_outputs(A, B)
    assert found.rows()[0]["score"] == pytest.approx(metrics.cohen_kappa_score(A, B), abs=1e-14)


def test_error_overlap_is_cohens_kappa_of_the_errors() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    expected = metrics.cohen_kappa_score(A == LABELS, B == LABELS)
    assert sosie.measure("error_overlap", A, B, labels=LABELS) == pytest.approx(expected, abs=1e-14)


def test_error_overlap_by_geirhos_formula() -> None:
    """κ = (c_obs − c_exp) / (1 − c_exp) with c_exp = p₁p₂ + (1 − p₁)(1 − p₂)."""
    right_a, right_b = A == LABELS, B == LABELS
    observed = (right_a == right_b).mean()
    expected = right_a.mean() * right_b.mean() + (1 - right_a.mean()) * (1 - right_b.mean())
    found = sosie.measure("error_overlap", A, B, labels=LABELS)
    assert found == pytest.approx((observed - expected) / (1 - expected), abs=1e-14)


def test_accuracy_difference_and_bad_churn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    accuracy_a, accuracy_b = (metrics.accuracy_score(LABELS, side) for side in (A, B))
    assert sosie.measure("accuracy_difference", A, B, labels=LABELS) == pytest.approx(accuracy_a - accuracy_b)
    assert sosie.measure("accuracy_difference", B, A, labels=LABELS) == pytest.approx(accuracy_a - accuracy_b)
    assert sosie.measure("bad_churn", A, B, labels=LABELS) == pytest.approx(((A == LABELS) & (B != LABELS)).mean())


def test_min_max_normalised_disagreement() -> None:
    """By hand: of 10 inputs A gets 2 wrong and B 3, and they differ on 3; possible are 1 to 5."""
    labels = np.zeros(10, dtype=int)
    a, b = labels.copy(), labels.copy()
    a[:2], b[1:4] = 1, 1
    assert sosie.measure("disagreement", a, b) == pytest.approx(0.3)
    assert sosie.measure("min_max_normalised_disagreement", a, b, labels=labels) == pytest.approx((3 - 1) / (5 - 1))
    nested, apart = labels.copy(), labels.copy()
    nested[:3], apart[5:8] = 1, 1
    assert sosie.measure("min_max_normalised_disagreement", a, nested, labels=labels) == 0
    assert sosie.measure("min_max_normalised_disagreement", a, apart, labels=labels) == 1


def test_the_least_and_the_most_disagreement_by_trying_all() -> None:
    """Over all predictions of 4 inputs in 3 classes, the rescaled disagreement just reaches 0 and 1."""
    labels, found = np.zeros(4, dtype=int), {}
    every = [np.array(p) for p in itertools.product(range(3), repeat=4)]
    for a, b in itertools.product(every, every):
        errors = int((a > 0).sum()), int((b > 0).sum())
        if 0 in errors:
            continue
        value = sosie.measure("min_max_normalised_disagreement", a, b, labels=labels)
        low, high = found.get(errors, (2.0, -1.0))
        found[errors] = min(low, value), max(high, value)
    assert set(found.values()) == {(0.0, 1.0)}


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_jensen_shannon_is_scipys_distance_squared_in_bits(kind: str) -> None:
    p, q = softmax(LOGITS_A, axis=1), softmax(LOGITS_B, axis=1)
    expected = (jensenshannon(p, q, base=2, axis=1) ** 2).mean()
    a, b = (LOGITS_A, LOGITS_B) if kind == "logits" else (p, q)
    assert sosie.measure("jensen_shannon", a, b) == pytest.approx(expected, abs=1e-12)


def test_jensen_shannon_where_nothing_is_shared() -> None:
    p, q = np.eye(3)[[0, 1]], np.eye(3)[[1, 2]]
    assert sosie.measure("jensen_shannon", p, q) == 1
    assert sosie.measure("jensen_shannon", p, p) == 0
    huge = np.array([[900.0, 0, -900], [0, 900, 0]])
    assert sosie.measure("jensen_shannon", huge, huge[:, ::-1].copy()) == pytest.approx(0.5)


def test_numbers_against_scipy_and_numpy() -> None:
    x, y = LOGITS_A[:, 0], LOGITS_A[:, 0] + LOGITS_B[:, 0]
    assert sosie.measure("output_correlation", x, y) == pytest.approx(pearsonr(x, y).statistic, abs=1e-14)
    assert sosie.measure("output_rmse", x, y) == pytest.approx(np.sqrt(((x - y) ** 2).mean()), abs=1e-14)
    several = np.mean([pearsonr(LOGITS_A[:, k], LOGITS_B[:, k]).statistic for k in range(5)])
    assert sosie.measure("output_correlation", LOGITS_A, LOGITS_B, kind="regression") == pytest.approx(several)
    rmse = np.sqrt(((LOGITS_A - LOGITS_B) ** 2).mean())
    assert sosie.measure("output_rmse", LOGITS_A, LOGITS_B, kind="regression") == pytest.approx(rmse)


def test_a_large_mean_costs_no_digits() -> None:
    x, y = LOGITS_A[:, 0], LOGITS_A[:, 0] + LOGITS_B[:, 0]
    parts = [
        OutputSums.of(torch.tensor(x[k : k + 7] + 1e8), torch.tensor(y[k : k + 7] - 1e8), start=k)
        for k in range(0, 400, 7)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total.merge(part)
    assert float(MEASURES["output_correlation"].from_outputs(total)) == pytest.approx(
        pearsonr(x, y).statistic, abs=1e-7
    )


# Chance


def over_all_shuffles(name: str, a: np.ndarray, b: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The value for every pairing of A with B. With labels, which of its answers are right moves with the answer."""
    every = np.array(list(itertools.permutations(range(len(a)))))
    if "labels" not in MEASURES[name].needs:
        values = [(a == b[order]).mean() for order in every]
        return np.array(values) if name == "agreement" else 1 - np.array(values)
    zeros = np.zeros(len(a), dtype=int)
    wrong_a, wrong_b = (a != labels).astype(int), (b != labels).astype(int)
    return np.array([sosie.measure(name, wrong_a, wrong_b[order], labels=zeros) for order in every])


@pytest.mark.parametrize("name", ["agreement", "disagreement", "churn", "bad_churn", "error_overlap"])
@pytest.mark.parametrize("seed", [0, 1])
def test_chance_is_what_all_shuffles_give(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, 6)
    a, b = (np.where(random.random(6) < 0.5, labels, random.integers(0, 3, 6)) for _ in range(2))
    a[0], b[0], a[1], b[1] = labels[0], labels[0], (labels[1] + 1) % 3, (labels[1] + 1) % 3  # both are defined
    values = over_all_shuffles(name, a, b, labels)
    sums = OutputSums.of(*map(torch.tensor, (a, b)), labels=torch.tensor(labels))
    chance = chance_of(name, sums)
    assert chance is not None
    mean, spread, p = chance
    assert (mean, spread) == pytest.approx((values.mean(), values.std()), abs=1e-14)
    if p is not None:
        seen = sosie.measure(name, a, b, labels=labels)
        as_close = values >= seen - 1e-12 if MEASURES[name].closer == "up" else values <= seen + 1e-12
        assert p == pytest.approx(as_close.mean(), abs=1e-12)


def test_chance_of_a_correlation() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 6))
    values = np.array([pearsonr(x, y[list(order)]).statistic for order in itertools.permutations(range(6))])
    chance = chance_of("output_correlation", OutputSums.of(torch.tensor(x), torch.tensor(y)))
    assert chance is not None
    assert (values.mean(), values.std()) == pytest.approx(chance[:2], abs=1e-14)


def test_chance_at_scale_by_drawn_shuffles() -> None:
    draws = np.random.default_rng(1)
    values = np.array([(draws.permutation(B) == A).mean() for _ in range(4000)])
    row = sosie.compare_outputs(A, B, measures="agreement").rows()[0]
    assert abs(values.mean() - row["null"]) < 4 * row["null_spread"] / 4000**0.5
    assert values.std() == pytest.approx(row["null_spread"], rel=0.05)


def test_no_chance_where_none_is_known() -> None:
    sums = OutputSums.of(torch.tensor(LOGITS_A), torch.tensor(LOGITS_B), labels=torch.tensor(LABELS))
    for name in ("jensen_shannon", "accuracy_difference", "min_max_normalised_disagreement"):
        assert chance_of(name, sums) is None


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Agreement of models that agree on 70 % of inputs: 95 % intervals hold 0.7 in most of 200 draws."""
    random = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        a = random.integers(0, 3, 640)
        b = np.where(random.random(640) < 0.7, a, (a + 1) % 3)
        row = sosie.compare_outputs(a, b, measures="agreement").rows()[0]
        held += row["low"] <= 0.7 <= row["high"]
    assert 0.90 <= held / 200 <= 0.99
