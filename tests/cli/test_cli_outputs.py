"""`sosie outputs` as a user meets it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from test_cli import MODELS, run_here

import sosie


def test_outputs(tmp_path: Path) -> None:
    found = run_here("outputs", *MODELS, "--data", "demo", "--max-rows", "128", "--out", "o.json", "--html", "o.html",
                cwd=tmp_path)  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stderr == "", "progress in a pipe"
    words = " ".join(found.stdout.split())
    assert re.search(r"small_cnn-seed0 and small_cnn-seed1 give the same answer for [\d.]+% of 128 inputs", words)
    assert re.search(r"small_cnn-seed0 is right for [\d.]+%, small_cnn-seed1 for [\d.]+%\.", words)
    for name in ("agreement", "error_overlap", "jensen_shannon"):
        assert name in found.stdout
    direct = sosie.compare_outputs(*MODELS, "demo", max_rows=128)
    assert sosie.load(tmp_path / "o.json").matrix("agreement") == direct.matrix("agreement")
    assert "<html" in (tmp_path / "o.html").read_text("utf-8")


def test_predictions_and_chosen_measures(tmp_path: Path) -> None:
    for k in range(3):
        np.savez(tmp_path / f"p{k}.npz", np.arange(40) % (k + 2))
    found = run_here(
        "outputs", "p0.npz", "p1.npz", "p2.npz", "--measures", "agreement", "--out", "o.json", cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert sosie.load(tmp_path / "o.json").names == ("p0", "p1", "p2")
    wrong = run_here("outputs", "p0.npz", "p1.npz", "--measures", "error_overlap", cwd=tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: error_overlap: it needs labels")


def test_shifts(tmp_path: Path) -> None:
    shifts = "clean,fog(severity=5),pgd(steps=2)"
    options = ["--data", "demo", "--max-rows", "32", "--shifts", shifts, "--measures", "agreement", "--out", "o.json"]
    found = run_here("outputs", *MODELS, *options, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "pgd(steps=2) on B" in found.stdout
    stored = sosie.load(tmp_path / "o.json")
    assert stored.sites_a == ["clean", "fog(severity=5)", "pgd(steps=2) on A", "pgd(steps=2) on B"]
    wrong = run_here("outputs", *MODELS, "--data", "demo", "--shifts", "fogg", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "did you mean 'fog'" in wrong.stderr
