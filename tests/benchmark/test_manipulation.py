"""Manipulations change the function as declared, and known measures as theory predicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_benchmark import TINY

from sosie.benchmark.candidates import open_candidates
from sosie.benchmark.population import last_hidden, open_benchmark_images, perceptron
from sosie.benchmark.trials import MANIPULATIONS, Bench, manipulate
from sosie.measures import MEASURES
from sosie.train import Recipe, accuracy, fit

ROWS_AS_BEFORE = {"classes rolled", "biased", "dark pixels"}


@pytest.fixture(scope="module")
def bench() -> Bench:
    images = open_benchmark_images(TINY, seed=0, device=torch.device("cpu"))
    models = []
    for seed in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = perceptron((2, 16), images.inputs, images.classes)
        fit(model, images.train, images.train_labels, recipe=Recipe(epochs=8), seed=seed)
        assert accuracy(model, images.test, images.test_labels) > 0.7
        models.append(model.requires_grad_(False))
    return Bench(models, images.test, seed=0)


def found(name: str, bench: Bench, far: float = 0.0) -> dict[str, dict[str, float]]:
    (candidate,) = open_candidates(name, TINY, rows=TINY.test)
    return manipulate(candidate, far, bench)["manipulations"]


def test_the_function_stays_or_breaks(bench: Bench) -> None:
    for manipulation in MANIPULATIONS:
        agreement = bench.agreement(manipulation.name)
        assert agreement is not None
        assert agreement == 1 if manipulation.keeps else agreement < 0.8, manipulation.name
    assert bench.agreement("classes rolled") == 0


def test_rows_are_those_of_the_changed_networks(bench: Bench) -> None:
    """A measure of activations gets those of the changed network, which do change unless declared otherwise."""
    for manipulation in MANIPULATIONS:
        for before, every in zip(bench.before, bench.changed[manipulation.name], strict=True):
            for changed in every or ():
                if changed.model is not None:
                    assert torch.equal(changed.rows, last_hidden(changed.model, bench.images))
                same = changed.rows.shape == before.rows.shape and torch.allclose(changed.rows, before.rows, atol=1e-5)
                assert same == (manipulation.name in ROWS_AS_BEFORE), manipulation.name


def test_measures_stay_where_they_declare_invariance(bench: Bench) -> None:
    """Declared invariances and manipulations of the same kind agree, both ways."""
    for name in ("linear_cka", "mean_cca", "procrustes_angle", "mutual_knn", "hard_correlation_match"):
        measure = MEASURES[name]
        moved = found(name, bench, far=0.0 if measure.closer == "up" else 1.0)
        assert abs(moved["permuted"]["moved"]) < 1e-5
        assert (abs(moved["rotated"]["moved"]) < 1e-4) == ("rotation" in measure.invariant), name
        stretched = abs(moved["rescaled"]["moved"]) < 1e-4
        assert stretched == ("stretch" in measure.invariant), name
        assert all(abs(moved[same]["moved"]) < 1e-5 for same in ROWS_AS_BEFORE)


def test_cka_can_be_moved_almost_at_will(bench: Bench) -> None:
    """Davari et al. 2023: a subset of rows moved far away takes CKA down; so does a map found by its gradient."""
    moved = found("linear_cka", bench)
    assert moved["translated rows"]["moved"] > 0.8
    assert moved["self-map"]["moved"] > 0.5
    assert found("mean_cca", bench)["self-map"]["moved"] < 0.05  # CCA ignores invertible maps


def test_weights_see_what_activations_do_not(bench: Bench) -> None:
    """wCKA: blind to rolled classes and to biases, moved by weights on pixels that are never lit."""
    moved = found("wcka", bench)
    for blind in ("classes rolled", "biased", "permuted", "rescaled", "self-map"):
        assert abs(moved[blind]["moved"]) < 1e-5, blind
    assert moved["dark pixels"]["moved"] > 0.05
    assert "reads networks" in moved["translated rows"]["why"]


def test_moves_are_measured_between_the_network_itself_and_untrained_ones(bench: Bench) -> None:
    near, far = found("linear_cka", bench, far=0.5), found("linear_cka", bench, far=0.0)
    assert near["self-map"]["moved"] == pytest.approx(2 * far["self-map"]["moved"])
    assert near["self-map"]["value"] == far["self-map"]["value"]
    assert "no scale" in found("linear_cka", bench, far=1.0)["self-map"]["why"]


def test_a_measure_that_fails_on_one_says_why(bench: Bench) -> None:
    def touchy(x: np.ndarray, y: np.ndarray) -> float:
        if not np.allclose(x, y):
            raise RuntimeError("too different")
        return 1.0

    (candidate,) = open_candidates(touchy, TINY)
    moved = manipulate(candidate, 0.0, bench)["manipulations"]
    assert "too different" in moved["rotated"]["why"]
    assert moved["classes rolled"]["moved"] == 0
