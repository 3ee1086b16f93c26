"""The experiments of the gradients paper run, on a handful of images; what is written down of them fits together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PAPERS = Path(__file__).resolve().parents[2] / "papers"
PAPER = PAPERS / "gradients"
sys.path.insert(0, str(PAPERS))

from claims import read_claims, read_number  # noqa: E402


def pack(folder: Path, name: str, shape: tuple[int, ...], classes: int) -> None:
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        images = random.integers(0, 256, (20, *shape), dtype=np.uint8)
        np.savez(folder / f"{name}-{split}1k.npz", images=images, labels=np.arange(20) % classes)


def test_an_experiment_runs_and_can_be_drawn(tmp_path: Path) -> None:
    pack(tmp_path, "cifar10", (32, 32, 3), 10)
    results = tmp_path / "results"
    options = ("--small", "--device", "cpu", "--results", str(results), "--only", "bounds")
    environment = {**os.environ, "SOSIE_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(PAPER / "run.py"), *options], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((results / "bounds.json").read_text())
    assert found["numbers"]["equation_39_held"] == 1  # nothing is dropped in it
    verdicts = {each["name"]: each["verdict"] for each in json.loads((results / "verdicts.json").read_text())}
    assert verdicts["equation-39-additive"] == "reproduced"
    assert verdicts["figure-1-both-first"] == "not run"
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    drawn = subprocess.run(
        [sys.executable, str(PAPER / "draw.py"), str(results)], capture_output=True, text=True, check=False
    )
    assert {Path(line).stem for line in drawn.stdout.splitlines()} == {"bounds"}, drawn.stderr


def test_every_claim_was_judged_by_a_number_that_is_there() -> None:
    verdicts = {each["name"]: each for each in json.loads((PAPER / "results" / "verdicts.json").read_text())}
    for claim in read_claims(PAPER / "expected.toml"):
        value = read_number(PAPER / "results", claim.measured)
        assert value is not None
        assert verdicts[claim.name]["value"] == value
        assert verdicts[claim.name]["verdict"] == claim.judge(value)


def test_the_readme_counts_as_the_verdicts_do() -> None:
    verdicts = [each["verdict"] for each in json.loads((PAPER / "results" / "verdicts.json").read_text())]
    text = " ".join((PAPER / "README.md").read_text().split())
    assert f"Of {len(verdicts)} claims" in text
    assert f"{verdicts.count('reproduced')} were reproduced and {verdicts.count('not reproduced')} were not" in text


def test_the_three_desiderata_are_counted() -> None:
    code = (
        "import json, desiderata as d\n"
        "at = lambda value: {'mean': value, 'chance': 0.5}\n"
        "pairs = {'cifar10-cifar10': .9, 'cifar100-cifar100': .8, 'mnist-mnist': .95,\n"
        "         'cifar10-cifar100': .7, 'cifar10-mnist': .6, 'cifar100-mnist': .5}\n"
        "good = {p: {'s': at(v), 't': at(v)} for p, v in pairs.items()}\n"
        "good['cifar100-cifar100']['t'] = at(.65)\n"  # below a pair of different data sets
        "print(json.dumps(d.desiderata(good)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PAPER), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=PAPER
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["first_at"], found["second_at"], found["third_at"], found["all_at"]) == (1, 2, 2, 1)
    assert found["strangers_farthest_from_chance"] == pytest.approx(0.2)
    assert found["strangers_above_chance"] == pytest.approx(0.1)
