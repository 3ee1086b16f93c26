"""The benchmark from networks to leaderboard: all measures, users' functions, interruptions, refusals."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import python
from tiny_benchmark import TINY

import sosie
from sosie.benchmark import SCALES, run_benchmark
from sosie.benchmark.candidates import open_candidates, values_of
from sosie.benchmark.population import (
    PAIR_KINDS,
    BenchmarkFolder,
    Member,
    cohorts_of,
    last_hidden,
    make_population,
    measure_folder,
    open_benchmark_images,
    pairs_of,
    perceptron,
)
from sosie.benchmark.trials import auc
from sosie.measures import MEASURES
from sosie.results import Leaderboard


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Leaderboard, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return run_benchmark(["linear_cka", "gulp", "mutual_knn(k=3)", "wcka"], scale=TINY, folder=folder), folder


def cka(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    with np.errstate(invalid="ignore"):
        return np.linalg.norm(x.T @ y) ** 2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)


def distance(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return sum(float((p - q).square().sum()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


distance.of = "models"  # type: ignore[attr-defined]


def unlucky(x: np.ndarray, y: np.ndarray) -> float:
    raise RuntimeError("no luck")


def aimless(x: np.ndarray, y: np.ndarray) -> float:
    return float(x.sum() * 0 + np.sin(1e6 * (x.sum() + 2 * y.sum())))


def test_every_stage_has_numbers(tiny: tuple[Leaderboard, Path]) -> None:
    found, _ = tiny
    assert found.pairs == {"seed": 24, "epoch": 12, "architecture": 12, "strategy": 12}
    assert set(found.conditions) == {"clean", "corrupted", "attacked", "all"}
    for entry in found:
        assert not entry.failures, entry.failures
        assert entry.auc == 1  # checkpoints an epoch apart against untrained networks
        assert set(entry.grounding) == set(PAIR_KINDS)
        for kind in entry.grounding.values():
            for coefficient in kind["groups"]["all"].values():
                assert coefficient["low"] <= coefficient["value"] <= coefficient["high"]
            assert set(kind["conditions"]) == {"fog", "attack: fgsm(epsilon=0.1)"}
        assert entry.seconds is not None
        assert entry.seconds > 0
    ranks = [entry.correlation() for entry in found]
    assert ranks == sorted(ranks, reverse=True)
    assert found.leader == found.entries[0].name
    assert not found[found.leader].against
    others = [entry for entry in found if entry.name != found.leader]
    assert all(set(entry.against) == set(PAIR_KINDS) for entry in others)


def test_no_more_images_are_shown_than_asked_for(tiny: tuple[Leaderboard, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny[1], tmp_path / "fewer")  # with its networks
    calibration = run_benchmark("debiased_cka", scale=TINY, folder=folder, rows=8)["debiased_cka"].calibration
    assert calibration["number"] == 8
    assert [number for number, _ in calibration["numbers"]] == [8]


def test_a_leaderboard_comes_back_from_its_file(tiny: tuple[Leaderboard, Path]) -> None:
    found, folder = tiny
    again = Leaderboard.load(folder / "leaderboard.json")
    assert again.rows() == json.loads(json.dumps(found.rows()))
    assert again["wcka"].manipulation == found["wcka"].manipulation
    with pytest.raises(KeyError, match="there are"):
        again["nothing"]
    (folder / "other.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="not a saved result"):
        Leaderboard.load(folder / "other.json")


def test_own_measures_join_the_others(tiny: tuple[Leaderboard, Path], tmp_path: Path) -> None:
    """A function of activations equals sosie's measure; failures are listed and undefined pairs counted."""
    first, folder = tiny
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.parent != folder}
    found = run_benchmark([cka, distance, unlucky, aimless], scale=TINY, folder=folder)
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())  # no work was repeated
    assert {entry.name for entry in found} == {entry.name for entry in first} | {
        "cka",
        "distance",
        "unlucky",
        "aimless",
    }
    for kind in PAIR_KINDS:
        own, sosies = (np.array(found[name].grounding[kind]["values"], dtype=float) for name in ("cka", "linear_cka"))
        assert own == pytest.approx(sosies, abs=1e-9, nan_ok=True)
        assert np.isfinite(own).sum() > 5
    assert any("found by comparing" in note for note in found["cka"].notes)
    assert found["cka"].closer == "up"
    assert found["distance"].closer == "down"
    assert "grounding-architecture" in found["distance"].failures  # these networks have no equal tensors
    assert found["distance"].grounding["seed"]["defined"] == 24
    assert "no luck" in found["unlucky"].failures["direction"]
    assert "declare closer" in found["aimless"].failures["direction"]
    assert found.rows()[-1]["rank"] is None


def test_a_changed_function_is_tried_again(tmp_path: Path, tiny: tuple[Leaderboard, Path]) -> None:
    _, folder = tiny
    file = tmp_path / "mine.py"
    text = "def mine(x, y, power=1):\n    return float(-abs(x.var() - y.var()) ** power)\nmine.closer = 'up'\n"
    file.write_text(text)
    spec = f"{file}:mine"
    first = run_benchmark(spec, scale=TINY, folder=folder)["mine"]
    file.write_text(text.replace("x.var()", "2 * x.var()"))
    second = run_benchmark(spec, scale=TINY, folder=folder)["mine"]
    assert first.grounding["seed"]["values"] != second.grounding["seed"]["values"]
    assert first.closer == second.closer == "up"


@pytest.mark.parametrize(
    "name",
    [m.name for m in MEASURES.values() if m.reads_layers],
)
def test_values_of_many_pairs_are_those_of_one(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.rand(24, 9, generator=random, dtype=torch.float64)
    rows = [(inputs @ torch.randn(9, 6, generator=random, dtype=torch.float64)).relu() for _ in range(3)]
    (candidate,) = open_candidates(name, TINY)
    found = values_of(candidate, rows, [(0, 1), (2, 1), (1, 1)], inputs=inputs)
    given = {"inputs": inputs} if "inputs" in MEASURES[name].needs else {}
    if "ImportError" in str(found.reasons):
        pytest.skip(str(found.reasons))
    pairs = [(0, 1), (2, 1), (1, 1)]
    if MEASURES[name].few_rows == "infinite":
        assert np.isnan(found.values[2])
        assert "infinite" in str(found.reasons)
        pairs = pairs[:2]
    wanted = [sosie.measure(name, rows[i], rows[j], **given) for i, j in pairs]
    rounding = 1e-7 if name.endswith("_angle") else 1e-9  # near 0 an angle is the root of its cosine's rounding
    assert found.values[: len(pairs)] == pytest.approx(wanted, abs=rounding)


def test_pairs_differ_in_one_respect_only() -> None:
    members = [Member((1, width), strategy, seed, epoch) for width in (8, 32) for strategy in ("a", "b")
               for seed in range(3) for epoch in (1, 5)]  # fmt: skip
    for kind in PAIR_KINDS:
        for cohort in cohorts_of(members, kind):
            for i, j in pairs_of(cohort):
                different = [other for other in PAIR_KINDS if getattr(members[i], other) != getattr(members[j], other)]
                assert different == [kind]
    assert sum(len(pairs_of(cohort)) for cohort in cohorts_of(members, "seed")) == 3 * 8
    assert len({member.run for member in members}) == 12


def test_a_layer_of_dead_neurons_is_undefined_with_a_reason() -> None:
    rows = [torch.rand(20, 4, dtype=torch.float64), torch.zeros(20, 4, dtype=torch.float64)]
    for name in ("linear_cka", "gulp", "mutual_knn"):
        (candidate,) = open_candidates(name, TINY)
        found = values_of(candidate, rows, [(0, 1), (0, 0)])
        assert np.isnan(found.values[0])
        assert np.isfinite(found.values[1])
        assert "does not vary" in next(iter(found.reasons))


def test_auc() -> None:
    alike, unlike = np.array([3.0, 4.0, 5.0]), np.array([1.0, 2.0, 3.0])
    assert auc(alike, unlike, "up") == pytest.approx(8.5 / 9)  # of nine pairs one is a tie
    assert auc(alike, unlike, "down") == pytest.approx(0.5 / 9)
    assert auc(np.ones(3), np.ones(5), "up") == 0.5
    with pytest.raises(ValueError, match="both kinds"):
        auc(alike, np.zeros(0), "up")


KILLED = """
import os, sys
from pathlib import Path
def fragile(x, y):
    calls = Path({calls!r})
    count = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(count))
    if count == {last}:
        os.kill(os.getpid(), 9)
    return float(((x - x.mean(0)).T @ (y - y.mean(0))).var())
fragile.closer = "up"
"""
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from tiny_benchmark import TINY
from sosie.benchmark import run_benchmark
run_benchmark(["debiased_cka", sys.argv[2]], scale=TINY, folder=sys.argv[3])
"""


def test_killed_in_the_middle_it_goes_on(tmp_path: Path, tiny: tuple[Leaderboard, Path]) -> None:
    """Killed within the grounding of the second measure: finished units are kept, and the result is the same."""
    file, folder = tmp_path / "measure.py", tmp_path / "out"
    file.write_text(KILLED.format(calls=str(tmp_path / "calls"), last=75))

    def run() -> subprocess.CompletedProcess[str]:
        return python("-c", RUN, Path(__file__).parent, f"{file}:fragile", folder)

    assert run().returncode == -signal.SIGKILL
    assert not (folder / "leaderboard.json").exists()
    assert not list(folder.rglob("*.part"))
    done = {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*.*")
        if path.name not in ("settings.json", "about.json")
    }
    units = [path.name for path in (folder / measure_folder("fragile")).iterdir()]
    assert "calibration.json" in units
    assert "manipulation.json" not in units
    finished = run()
    assert finished.returncode == 0, finished.stderr
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    found = Leaderboard.load(folder / "leaderboard.json")
    assert {entry.name for entry in found} == {"debiased_cka", "fragile"}
    whole = run_benchmark(f"{file}:fragile", scale=TINY, folder=tiny[1])["fragile"]
    assert found["fragile"].grounding == whole.grounding
    assert found["fragile"].manipulation == whole.manipulation


def test_a_folder_holds_one_benchmark(tiny: tuple[Leaderboard, Path]) -> None:
    with pytest.raises(ValueError, match="seed"):
        run_benchmark("linear_cka", scale=TINY, folder=tiny[1], seed=1)
    with pytest.raises(ValueError, match="scale"):
        run_benchmark("linear_cka", scale=replace(TINY, test=30), folder=tiny[1])


def test_a_damaged_unit_is_told(tmp_path: Path) -> None:
    store = BenchmarkFolder(tmp_path, {"a": 1})
    assert store.json("unit", lambda: {"x": float("nan"), "y": np.arange(2)}) == {"x": None, "y": [0, 1]}
    (tmp_path / "unit.json").write_text('{"made_of": ""')
    with pytest.raises(ValueError, match="remove it"):
        store.json("unit", dict)
    assert BenchmarkFolder(tmp_path, {"a": 1}, resume=False).json("unit", lambda: {"x": 2}) == {"x": 2}


@pytest.mark.parametrize(
    ("measures", "options", "message"),
    [
        ("agreement", {}, "judged"),
        ("no_such_measure", {}, "no measure is called"),
        (["linear_cka", "linear_cka"], {}, "given twice"),
        ([], {}, "no measures"),
        (3.5, {}, "a name, file.py:function or a callable"),
        (cka, {"of": "pixels"}, "'activations', 'models'"),
        (cka, {"closer": "left"}, "'up' .* or 'down'"),
    ],
)
def test_what_cannot_be_tested_is_refused(measures: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError), match=message):
        open_candidates(measures, TINY, **options)


def test_slow_measures_state_their_limit() -> None:
    (candidate,) = open_candidates("mutual_knn", SCALES["small"])
    assert candidate.rows == 150
    assert "sees at most 150 of 300 images" in candidate.notes[0]
    assert open_candidates("linear_cka", SCALES["small"])[0].notes == ()
    assert open_candidates("linear_cka", SCALES["small"], rows=50)[0].rows == 50


def test_a_budget_leaves_the_rest_undefined() -> None:
    rows = [torch.rand(20, 4, dtype=torch.float64) for _ in range(3)]
    (candidate,) = open_candidates(cka, TINY)
    found = values_of(candidate, rows, [(0, 1), (1, 2)], deadline=-1.0)
    assert np.isnan(found.values).all()
    assert "budget" in next(iter(found.reasons))


def test_networks_and_images_are_seeded(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    images = [open_benchmark_images(TINY, seed=0, device=cpu) for _ in range(2)]
    assert torch.equal(images[0].test, images[1].test)
    assert set(images[0].test_labels.tolist()) == {0, 1, 2}
    small = replace(TINY, strategies=("standard",), architectures=((1, 8),))
    first, second = (
        make_population(small, images[0], BenchmarkFolder(tmp_path / str(k), {}), seed=0) for k in range(2)
    )
    kept = make_population(small, images[0], BenchmarkFolder(tmp_path / "0", {}), seed=0)
    for a, b, c in zip(first.models, second.models, kept.models, strict=True):
        rows = last_hidden(a, images[0].test)
        assert torch.equal(rows, last_hidden(b, images[0].test))
        assert torch.equal(rows, last_hidden(c, images[0].test))


def test_networks_of_another_kind_and_none_for_calibration(tmp_path: Path) -> None:
    scale = replace(TINY, strategies=("standard",), architectures=((1, 8),), random=0, converged=0)
    images = open_benchmark_images(scale, seed=0, device=torch.device("cpu"))

    def halved(architecture: tuple[int, int]) -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.AvgPool2d(2), *perceptron(architecture, images.inputs // 4, images.classes))

    found = make_population(scale, images, BenchmarkFolder(tmp_path, {}), seed=0, make=halved)
    assert found.untrained == found.converged == ()
    assert all(isinstance(model[0], torch.nn.AvgPool2d) for model in found.models)
    assert last_hidden(found.models[0], images.test).shape == (len(images.test), 8)
