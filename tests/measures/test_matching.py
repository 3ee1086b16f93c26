"""Matches of neurons against brute force, SciPy and POT."""

from __future__ import annotations

import builtins
from itertools import permutations
from math import lcm
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from paired import correlated_rows, numpy_pair

import sosie
from sosie.measures import MEASURES
from sosie.stats import Moments, views


def unit(rows: np.ndarray) -> np.ndarray:
    rows = rows - rows.mean(0)
    return rows / np.linalg.norm(rows)


def test_permutation_procrustes_by_trying_all_matches() -> None:
    x, y = numpy_pair(5, 5)
    a, b = unit(x), unit(y)
    best = min(np.linalg.norm(a[:, list(order)] - b) for order in permutations(range(5)))
    assert sosie.measure("permutation_procrustes_distance", x, y) == pytest.approx(best, abs=1e-12)


def test_permutation_procrustes_pads_the_narrower_side_with_zeros() -> None:
    x, y = numpy_pair(6, 4)
    a, b = unit(x), np.c_[unit(y), np.zeros((80, 2))]
    best = min(np.linalg.norm(a[:, list(order)] - b) for order in permutations(range(6)))
    assert sosie.measure("permutation_procrustes_distance", x, y) == pytest.approx(best, abs=1e-12)
    assert sosie.measure("permutation_procrustes_distance", y, x) == pytest.approx(best, abs=1e-12)


def test_a_neuron_and_its_negative_are_as_far_apart_as_can_be() -> None:
    x, _ = numpy_pair(1, 1)
    assert sosie.measure("permutation_procrustes_distance", x, -x) == pytest.approx(2, abs=1e-12)
    assert sosie.measure("soft_match_distance", x, -x) == pytest.approx(2, abs=1e-12)
    assert sosie.measure("hard_correlation_match", x, -x) == pytest.approx(-1, abs=1e-12)
    assert sosie.measure("soft_correlation_match", x, -x) == pytest.approx(-1, abs=1e-12)


def test_no_match_is_closer_than_the_best_rotation() -> None:
    for seed in range(5):
        x, y = correlated_rows(seed=seed)
        matched = sosie.measure("permutation_procrustes_distance", x, y)
        assert matched >= sosie.measure("procrustes_distance", x, y) - 1e-12


def squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Between neurons, centred and with a mean squared norm of 1 on each side."""
    a, b = (unit(side) * np.sqrt(side.shape[1]) for side in (x, y))
    return ((a[:, :, None] - b[:, None, :]) ** 2).sum(0)


def test_soft_match_of_equal_widths_is_the_permutation_distance_and_the_transport_of_pot() -> None:
    ot = pytest.importorskip("ot", reason="POT is not installed")
    for seed in range(5):
        x, y = (side.numpy() for side in correlated_rows(p=8, q=8, seed=seed))
        found = sosie.measure("soft_match_distance", x, y)
        assert found == pytest.approx(sosie.measure("permutation_procrustes_distance", x, y), abs=1e-12)
        uniform = np.full(8, 1 / 8)
        assert found**2 == pytest.approx(ot.emd2(uniform, uniform, squared_distances(x, y)), abs=1e-10)


@pytest.mark.parametrize("widths", [(3, 2), (6, 4), (4, 7)], ids=str)
def test_soft_match_of_unequal_widths_against_linear_programming(widths: tuple[int, int]) -> None:
    pytest.importorskip("ot", reason="POT is not installed")
    p, q = widths
    x, y = numpy_pair(p, q)
    cost = squared_distances(x, y)
    sums = np.r_[np.kron(np.eye(p), np.ones(q)), np.kron(np.ones(p), np.eye(q))]
    solved = scipy.optimize.linprog(cost.ravel(), A_eq=sums, b_eq=np.r_[np.full(p, 1 / p), np.full(q, 1 / q)])
    assert sosie.measure("soft_match_distance", x, y) ** 2 == pytest.approx(solved.fun, abs=1e-9)


def test_soft_match_is_the_match_of_repeated_neurons() -> None:
    """Each neuron as often as makes the widths equal: a transport of equal weights splits into such copies."""
    pytest.importorskip("ot", reason="POT is not installed")
    x, y = numpy_pair(6, 4)
    copies = [np.repeat(side, lcm(6, 4) // side.shape[1], axis=1) for side in (x, y)]
    assert sosie.measure("soft_match_distance", x, y) == pytest.approx(
        sosie.measure("permutation_procrustes_distance", *copies), abs=1e-10
    )


def test_soft_match_of_unequal_widths_without_pot_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pot(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ot":
            raise ImportError("No module named 'ot'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pot)
    assert sosie.measure("soft_match_distance", *numpy_pair(4, 4)) > 0
    with pytest.raises(ImportError, match=r"6 and 4 neurons needs POT.*sosie\[transport\]"):
        sosie.measure("soft_match_distance", *numpy_pair())
    # In a comparison the pairs of equal widths keep their values, and the others say what they need.
    x, y = numpy_pair()
    found = sosie.compare({"wide": x}, {"wide": x[:, ::-1].copy(), "narrow": y}, measures="soft_match_distance")
    same, missing = found.rows()
    assert same["value"] == pytest.approx(0, abs=1e-6)
    assert np.isnan(missing["value"])
    assert "sosie[transport]" in " ".join(missing["caveats"])


def test_correlation_matches_by_trying_all_matches() -> None:
    x, y = numpy_pair(5, 4)
    correlations = np.corrcoef(x.T, y.T)[:5, 5:]
    best = max(correlations[list(order), range(4)].mean() for order in permutations(range(5), 4))
    assert sosie.measure("hard_correlation_match", x, y) == pytest.approx(best, abs=1e-12)
    assert sosie.measure("soft_correlation_match", x, y) == pytest.approx(correlations.max(1).mean(), abs=1e-12)
    assert sosie.measure("soft_correlation_match", y, x) == pytest.approx(correlations.max(0).mean(), abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e4 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dead_neuron_has_correlation_0_and_counts(value: float, dtype: torch.dtype) -> None:
    x = correlated_rows(n=77, p=3)[0]
    x = torch.cat([x, torch.full((77, 1), value, dtype=x.dtype)], dim=1).to(dtype)
    for name in ("hard_correlation_match", "soft_correlation_match"):
        measure = MEASURES[name]
        assert float(measure.of(x, x)) == pytest.approx(3 / 4, abs=1e-6)
        merged = Moments.of(x[:30], x[:30]).merge(Moments.of(x[30:], x[30:]))
        assert float(measure(merged.neurons())) == pytest.approx(3 / 4, abs=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("widths", [(5, 5), (6, 4), (4, 6), (100, 90)], ids=str)
def test_aligned_cosine_against_scipy(widths: tuple[int, int]) -> None:
    x, y = numpy_pair(*widths)
    widest = max(widths)
    a, b = (np.pad(side, ((0, 0), (0, widest - side.shape[1]))) for side in (x, y))
    rotation, _ = scipy.linalg.orthogonal_procrustes(a, b)
    turned = a @ rotation
    cosines = (turned * b).sum(1) / (np.linalg.norm(turned, axis=1) * np.linalg.norm(b, axis=1))
    assert sosie.measure("aligned_cosine", x, y) == pytest.approx(cosines.mean(), abs=1e-10)


def test_aligned_cosine_of_rows_without_a_direction() -> None:
    x, y = numpy_pair()
    x[3] = 0
    with pytest.raises(ValueError, match="1 of 80 rows are zero"):
        sosie.measure("aligned_cosine", x, y)


def test_too_many_pairs_of_neurons_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert views.MOST_PAIRS == 4096**2
    monkeypatch.setattr(views, "MOST_PAIRS", 23)
    x, y = correlated_rows(p=6, q=4)
    with pytest.raises(ValueError, match=r"matching 6 neurons with 4 means 24 pairs.*rows='mean'"):
        sosie.measure("hard_correlation_match", x, y)
    with pytest.raises(ValueError, match="24 pairs"):
        Moments.of(x, y).neurons()
