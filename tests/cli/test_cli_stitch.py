"""`sosie stitch` as a user meets it."""

from __future__ import annotations

from pathlib import Path

from test_cli import MODELS, run_here

import sosie
from sosie.data import open_data
from sosie.results import Comparison


def test_stitch(tmp_path: Path) -> None:
    found = run_here("stitch", *MODELS, "--site", "relu2", "--data", "demo", "--max-rows", "128", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "least_squares from relu2 of A to relu2 of B" in found.stdout
    fitted = sosie.stitch(MODELS[0], "relu2", MODELS[1], "relu2", open_data("demo", split="train", max_rows=128))
    expected = fitted.evaluate(open_data("demo", max_rows=128))
    assert f"{expected['agreement_b']:.4g}" in found.stdout
    wrong = run_here("stitch", *MODELS, "--site", "rilu2", "--data", "demo", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "relu2" in wrong.stderr


def test_stitch_at_all_sites(tmp_path: Path) -> None:
    files = ("--out", "c.json", "--report", "c.html")
    found = run_here("stitch", *MODELS, "--all-sites", "--data", "demo", "--max-rows", "128", *files, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    c = sosie.load(tmp_path / "c.json")
    assert isinstance(c, Comparison)
    expected = sosie.stitch_sites(
        *MODELS, open_data("demo", split="train", max_rows=128), test=open_data("demo", max_rows=128)
    )
    assert c.sites_a == expected.sites_a
    assert c["relative_accuracy"].value[0, 0] == expected["relative_accuracy"].value[0, 0]
    for text in ("relu2", "relative", "linear", f"{c['agreement_b'].value[0, 0]:.3f}", "off the diagonal"):
        assert text in found.stdout, text
    assert "Does the index tell?" in (tmp_path / "c.html").read_text("utf-8")


def test_what_does_not_go_together_is_told(tmp_path: Path) -> None:
    for words, message in (
        ((), "name the place to stitch"),
        (("--site", "relu2", "--all-sites"), "name the place to stitch"),
        (("--site", "relu2", "--out", "c.json"), "--out: only with --all-sites"),
        (("--all-sites", "--save", "s.safetensors"), "--save: only without --all-sites"),
        (("--site", "relu2", "--sites-b", "relu1"), "--sites-b: only with --all-sites"),
        (("--site", "relu2", "--fit", "task_loss(start=random)"), "a text in quotes"),
        (("--site", "relu2", "--precision", "half"), "float32"),
    ):
        found = run_here("stitch", *MODELS, "--data", "demo", "--max-rows", "16", *words, cwd=tmp_path)
        assert found.returncode == 1
        assert message in found.stderr, found.stderr


def test_sites_of_a_and_of_b_may_differ(tmp_path: Path) -> None:
    words = ("--all-sites", "--sites", "relu1", "--sites-b", "relu2", "--data", "demo", "--max-rows", "64")
    found = run_here("stitch", *MODELS, *words, "--out", "c.json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    c = sosie.load(tmp_path / "c.json")
    assert (c.sites_a, c.sites_b) == (["relu1"], ["relu2"])


def test_a_stitch_is_saved(tmp_path: Path) -> None:
    words = ("--site", "relu2", "--data", "demo", "--max-rows", "64", "--save", "s.safetensors")
    found = run_here("stitch", *MODELS, *words, "--precision", "float64", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "wrote s.safetensors" in found.stdout
    assert sosie.Stitch.load(tmp_path / "s.safetensors", *MODELS).n > 64
