"""Agreement of networks, by hand on clean, corrupted and attacked images; and grounding in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_benchmark import TINY
from torch import Tensor, nn

from sosie.benchmark import population as functional
from sosie.benchmark.candidates import open_candidates
from sosie.benchmark.population import (
    BenchmarkFolder,
    Images,
    Member,
    Population,
    agreements,
    open_benchmark_images,
    perceptron,
)
from sosie.benchmark.trials import Ground, difference, ground
from sosie.data import corrupt

CPU = torch.device("cpu")


def untrained(images: Images, seeds: int = 5) -> Population:
    """Networks of two epochs that differ only in their seeds."""
    members, models = [], []
    for seed in range(seeds):
        for epoch in (1, 2):
            with torch.random.fork_rng():
                torch.manual_seed(10 * seed + epoch)
                models.append(perceptron((1, 16), images.inputs, images.classes).requires_grad_(False))
            members.append(Member((1, 16), "standard", seed, epoch))
    return Population(tuple(members), tuple(models), (), ())


@pytest.fixture(scope="module")
def images() -> Images:
    return open_benchmark_images(TINY, seed=0, device=CPU)


def by_hand(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    return float(np.mean([int(a(one[None]).argmax()) == int(b(one[None]).argmax()) for one in x]))


def test_agreement_is_counted_under_every_condition(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = untrained(images, 3)

    def attack(model: nn.Module, x: Tensor, y: Tensor, kind: str, *, seed: int) -> Tensor:
        """A stand-in attack that depends on the attacked model: pixels move by its weights."""
        assert kind == "fgsm(epsilon=0.1)"
        assert torch.equal(y, images.test_labels)
        return (x + model[1].weight.mean(0).reshape(1, 1, 28, 28) * 9).clamp(0, 1)  # type: ignore[index]

    monkeypatch.setattr(functional, "attack", attack)
    found = agreements(TINY, images, population, BenchmarkFolder(tmp_path, {}), seed=3)
    a, b = population.models[0], population.models[2]  # epoch 1 of seeds 0 and 1
    assert found["clean"][0, 2] == by_hand(a, b, images.test)
    assert found["fog"][0, 2] == by_hand(a, b, corrupt(images.test, "fog", seed=3))
    attacked = [attack(model, images.test, images.test_labels, "fgsm(epsilon=0.1)", seed=3) for model in (a, b)]
    shares = [by_hand(a, b, x) for x in attacked]
    assert shares[0] != shares[1]
    assert found["attack: fgsm(epsilon=0.1)"][0, 2] == pytest.approx(np.mean(shares))
    three = [found["clean"][0, 2], found["fog"][0, 2], np.mean(shares)]
    assert found["all"][0, 2] == pytest.approx(np.mean(three))
    assert found["clean"][2, 0] == found["clean"][0, 2]
    assert np.isnan(found["clean"][0, 3])  # these differ in seed and epoch
    again = agreements(TINY, images, population, BenchmarkFolder(tmp_path, {}), seed=3)
    assert all(np.array_equal(again[name], found[name], equal_nan=True) for name in found)


@pytest.fixture
def at(images: Images) -> Ground:
    population = untrained(images)
    random = np.random.default_rng(0)
    agreement = {name: np.triu(random.random((10, 10)), 1) for name in ("all", "clean", "fog")}
    return Ground(TINY, population, {k: v + v.T for k, v in agreement.items()}, images.test, seed=0)


def test_correlations_are_of_the_right_pairs_the_right_way_up(at: Ground) -> None:
    """A measure that returns the agreement correlates with it by 1, whatever its direction."""
    rows = {float(x.sum()): k for k, x in enumerate(at.activations)}
    known = at.agreement["all"]

    def oracle(x: np.ndarray, y: np.ndarray) -> float:
        return float(known[rows[float(x.sum())], rows[float(y.sum())]])

    (candidate,) = open_candidates(oracle, TINY)
    for kind, count in (("seed", 20), ("epoch", 5)):
        up, down = (ground(candidate, closer, at, kind) for closer in ("up", "down"))  # type: ignore[arg-type]
        assert up["pairs"] == up["defined"] == count
        assert up["groups"]["all"]["spearman"]["value"] == pytest.approx(1)
        assert down["groups"]["all"]["pearson"]["value"] == pytest.approx(-1)
        other = at.agreement["fog"][tuple(at.pairs(kind).T)]
        wanted = stats.spearmanr(up["values"], other).statistic
        assert up["conditions"]["fog"]["spearman"] == pytest.approx(wanted)
    with pytest.raises(ValueError, match="differ in strategy"):
        ground(candidate, "up", at, "strategy")


def test_what_the_bootstrap_draws_are_training_runs(at: Ground) -> None:
    first, second = at.runs("epoch")
    assert np.array_equal(first, second)  # both checkpoints are of one run
    assert len(set(first)) == 5
    first, second = at.runs("seed")
    assert (first != second).all()


def test_a_better_measure_is_told_from_a_worse_one(at: Ground) -> None:
    truth = at.agreed("seed", "all")
    random = np.random.default_rng(1)
    good, poor = truth + 0.05 * random.normal(size=20), random.normal(size=20)
    poor[3] = np.nan
    found = difference(good, poor, at, "seed", "all", ranks=False)
    kept = np.isfinite(poor)
    wanted = stats.pearsonr(good[kept], truth[kept])[0] - stats.pearsonr(poor[kept], truth[kept])[0]
    assert found["value"] == pytest.approx(wanted)
    assert found["n"] == 19
    assert found["p"] < 0.01
    assert found["over_models"][0] > 0
    alike = difference(good, 2 * good + 1, at, "seed", "all", ranks=True)
    assert alike["value"] == 0
    assert alike["p"] == 1
    assert alike["over_models"] == [0, 0]


def test_a_measure_that_never_varies_says_so(at: Ground) -> None:
    (candidate,) = open_candidates(lambda x, y: 1.0, TINY, closer="up")
    found = ground(candidate, "up", at, "seed")
    assert "the correlation is undefined" in found["groups"]["all"]["why"]
