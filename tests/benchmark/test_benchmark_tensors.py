"""Measures of single tensors in the benchmark, and paths that are not folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_benchmark import TINY

import sosie
from sosie.benchmark import SCALES, run_benchmark
from sosie.benchmark.candidates import open_candidates, values_of
from sosie.benchmark.population import BenchmarkFolder
from sosie.measures import MEASURES
from sosie.results import Leaderboard
from sosie.stats import TensorPair


@pytest.mark.parametrize("name", [n for n, m in MEASURES.items() if m.reads is TensorPair])
def test_measures_of_tensors_are_the_mean_over_layers(name: str) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)) for _ in range(2)]
    found = values_of(open_candidates([name], SCALES["smoke"])[0], models, [(0, 1), (0, 0)])
    layers = [sosie.measure(name, models[0][k].weight, models[1][k].weight) for k in (0, 2)]
    assert found.values[0] == pytest.approx(np.mean(layers), rel=1e-12)
    assert found.values[1] == pytest.approx(MEASURES[name].same, abs=1e-12)


def test_networks_without_tensors_in_common_say_so() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)) for _ in range(2)]
    models[1][0] = torch.nn.Linear(6, 4)
    found = values_of(open_candidates(["weight_cosine"], SCALES["smoke"])[0], models, [(0, 1)])
    assert not found.defined.any()
    assert "differ in shape" in next(iter(found.reasons))


def test_what_is_not_defined_across_architectures_has_not_failed(tmp_path: Path) -> None:
    found = run_benchmark("weight_cosine", scale=replace(TINY, strategies=("standard",)), folder=tmp_path)
    entry = found["weight_cosine"]
    assert not entry.failures
    assert set(entry.undefined) == {"architecture", "strategy"}
    assert "differ in architecture: the networks do not have the same tensors" in entry.undefined["architecture"]
    assert "there are no pairs" in entry.undefined["strategy"]
    assert set(entry.grounding) == {"seed", "epoch"}
    assert found.rows()[0]["rank"] is None
    assert Leaderboard.load(tmp_path / "leaderboard.json")["weight_cosine"].undefined == entry.undefined


def test_what_the_budget_leaves_out_has_failed(tmp_path: Path) -> None:
    scale = replace(TINY, strategies=("standard",), budget=-1.0)
    found = run_benchmark("mutual_knn", scale=scale, folder=tmp_path)["mutual_knn"]
    assert "budget" in found.failures["grounding-architecture"]
    assert set(found.undefined) == {"strategy"}  # of which there are no pairs


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(NotADirectoryError, match="taken is a file: a benchmark needs a folder of its own"):
        BenchmarkFolder(tmp_path / "taken", {})
