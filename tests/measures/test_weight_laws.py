"""Every measure of pairs of weights keeps the laws it declares, and breaks those it does not; the laws can fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial
import torch
from changed_neurons import check_invariance, pair_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sosie.measures import MEASURES, Measure
from sosie.measures.define import TRANSFORMATIONS
from sosie.stats import TensorPair

OF_TENSORS = [measure for measure in MEASURES.values() if measure.reads is TensorPair]
measures = pytest.mark.parametrize("measure", OF_TENSORS, ids=lambda m: m.name)
SPECTRAL = ["stable_rank_difference", "spectrum_distance"]


def weights(shape: tuple[int, ...] = (6, 4, 3, 3), seed: int = 0, common: float = 1.0) -> tuple[Tensor, Tensor]:
    return pair_of(shape, seed, common)


def value_of(measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    return measure(TensorPair(x, y))


def check_symmetry(measure: Measure, x: Tensor, y: Tensor) -> None:
    gap = float((value_of(measure, x, y) - value_of(measure, y, x)).abs())
    assert (gap < 1e-12) == measure.symmetric, f"{measure.name} differs by {gap} when sides are swapped"


@measures
def test_weights_with_themselves(measure: Measure) -> None:
    x, _ = weights()
    assert float(value_of(measure, x, x.clone())) == pytest.approx(measure.same, abs=1e-12)


@measures
@pytest.mark.parametrize("how", TRANSFORMATIONS)
def test_invariant_exactly_where_declared(measure: Measure, how: str) -> None:
    check_invariance(measure, *weights(), how, value_of)


@measures
def test_symmetric_exactly_where_declared(measure: Measure) -> None:
    check_symmetry(measure, *weights())


@measures
def test_neurons_need_pairing_exactly_where_declared(measure: Measure) -> None:
    x, y = weights()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(2))
    moved = float((value_of(measure, x, y[order]) - value_of(measure, x, y)).abs())
    assert (moved > 1e-4) == measure.paired


@measures
@given(rows=st.integers(2, 9), columns=st.integers(2, 9), seed=st.integers(0, 99), common=st.floats(-2, 2))
@settings(max_examples=25, deadline=None)
def test_stays_within_its_bounds(measure: Measure, rows: int, columns: int, seed: int, common: float) -> None:
    x, y = weights((rows, columns), seed)
    value = float(value_of(measure, x, y + common * x))
    low, high = measure.bounds
    assert low is None or value >= low - 1e-12
    assert high is None or value <= high + 1e-12


@measures
def test_alike_is_closer_than_unrelated(measure: Measure) -> None:
    x, _ = weights()
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype).pow(4)
    near, far = value_of(measure, x, x + 0.05 * noise), value_of(measure, x, noise)
    assert (near > far) if measure.closer == "up" else (near < far)


@measures
@pytest.mark.parametrize("same", [False, True])
def test_gradient_is_finite_and_right(measure: Measure, same: bool) -> None:
    x, y = weights((5, 4))
    y = x.clone() if same else y
    x.requires_grad_(True)
    value_of(measure, x, y).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    if same:
        return
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    with torch.no_grad():
        ahead, behind = (value_of(measure, x + step * direction, y) for step in (1e-6, -1e-6))
    assert float((x.grad * direction).sum()) == pytest.approx(float((ahead - behind) / 2e-6), rel=1e-4, abs=1e-7)


@measures
def test_facts_are_complete(measure: Measure) -> None:
    facts = measure.facts()
    assert facts["summary"].strip()
    assert all(facts[key] for key in ("paper", "cost", "chance"))
    if measure.name.endswith("_distance"):
        assert measure.closer == "down"


def test_values_from_numpy_and_scipy() -> None:
    x, y = weights()
    a, b = x.numpy().reshape(6, -1), y.numpy().reshape(6, -1)
    of = {measure.name: float(value_of(measure, x, y)) for measure in OF_TENSORS}
    assert of["weight_cosine"] == pytest.approx(1 - scipy.spatial.distance.cosine(a.ravel(), b.ravel()), abs=1e-12)
    size = np.sqrt((np.linalg.norm(a) ** 2 + np.linalg.norm(b) ** 2) / 2)
    assert of["weight_distance"] == pytest.approx(np.linalg.norm(a - b) / size, abs=1e-12)
    s, t = (scipy.linalg.svdvals(m / np.linalg.norm(m)) for m in (a, b))
    assert of["spectrum_distance"] == pytest.approx(np.linalg.norm(s - t), abs=1e-12)
    ranks = [np.linalg.norm(m) ** 2 / np.linalg.norm(m, 2) ** 2 for m in (a, b)]
    assert of["stable_rank_difference"] == pytest.approx(abs(ranks[0] - ranks[1]), abs=1e-10)


def test_stable_ranks_known_in_closed_form() -> None:
    one = torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 4)).double()
    identity = torch.eye(4, 3).double()
    assert float(value_of(MEASURES["stable_rank_difference"], one, identity)) == pytest.approx(2)
    assert float(value_of(MEASURES["spectrum_distance"], one, identity)) == pytest.approx((2 - 2 / 3**0.5) ** 0.5)


def test_no_rotation_brings_weights_nearer_than_their_spectra() -> None:
    x, y = (side.flatten(1) / side.norm() for side in weights((5, 4)))
    least = float(value_of(MEASURES["spectrum_distance"], x, y))
    (u, _, v), (s, _, t) = (torch.linalg.svd(side, full_matrices=False) for side in (x, y))
    assert float((s @ u.T @ x @ v.T @ t - y).norm()) == pytest.approx(least, abs=1e-12)
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        left, right = (torch.linalg.qr(torch.randn(n, n, generator=random, dtype=x.dtype)).Q for n in (5, 4))
        assert float((left @ x @ right - y).norm()) > least


def test_chance_of_entries() -> None:
    pairs = [weights((20, 50), seed, common=0) for seed in range(60)]
    cosines = torch.tensor([float(value_of(MEASURES["weight_cosine"], *pair)) for pair in pairs])
    assert abs(float(cosines.mean())) < 4 / (1000 * 60) ** 0.5
    assert float(cosines.std()) == pytest.approx(1000**-0.5, rel=0.3)
    distances = torch.tensor([float(value_of(MEASURES["weight_distance"], *pair)) for pair in pairs])
    assert float(distances.mean()) == pytest.approx(2**0.5, abs=0.01)


def test_spectra_of_random_tensors_are_alike() -> None:
    unrelated = weights((20, 50), common=0)
    assert float(value_of(MEASURES["spectrum_distance"], *unrelated)) < 0.1
    assert float(value_of(MEASURES["stable_rank_difference"], *unrelated)) < 1.5


@pytest.mark.parametrize("name", SPECTRAL)
def test_a_vector_has_no_spectrum(name: str) -> None:
    for shape in ((7,), (7, 1), (1, 7)):
        with pytest.raises(ValueError, match=r"\(.*7.*\) are one vector"):
            value_of(MEASURES[name], torch.ones(shape), torch.ones(shape))


@measures
def test_bad_weights_are_errors_in_words(measure: Measure) -> None:
    x, _ = weights((4, 3))
    with pytest.raises(ValueError, match=r"one shape, got \(4, 3\) and \(3, 4\)"):
        value_of(measure, x, x.T)
    with pytest.raises(ValueError, match="are 0"):
        value_of(measure, torch.zeros_like(x), torch.zeros_like(x))


def test_the_laws_can_fail() -> None:
    liar = replace(MEASURES["weight_cosine"], invariant=frozenset({"permutation"}))
    with pytest.raises(AssertionError, match="weight_cosine under permutation moved"):
        check_invariance(liar, *weights(), "permutation", value_of)
    modest = replace(MEASURES["spectrum_distance"], invariant=frozenset())
    with pytest.raises(AssertionError, match="did not move"):
        check_invariance(modest, *weights(), "rotation", value_of)
    with pytest.raises(AssertionError, match="sides are swapped"):
        check_symmetry(replace(MEASURES["weight_cosine"], symmetric=False), *weights())
