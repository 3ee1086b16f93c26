"""`sosie dynamics` on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import sosie
from sosie.cli.main import app
from sosie.cli.options import matching
from sosie.history import Recorder
from sosie.models import small_cnn


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = small_cnn(atoms=6)
    with Recorder(tmp_path / "run", model) as recorder:
        for step in range(4):
            recorder.record(step)
            model.conv1.atoms.data += torch.randn(6, 3, 3, generator=torch.Generator().manual_seed(step))
    return tmp_path / "run"


def invoke(*words: object) -> str:
    found = CliRunner().invoke(app, ["dynamics", *map(str, words)])
    assert found.exit_code == 0, f"{found.output} {found.exception!r}"
    return found.output


def test_a_pattern_is_its_files_in_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (900, 1000):
        save_file(small_cnn().state_dict(), tmp_path / f"step-{step}.safetensors")
    pattern = f"small_cnn@{tmp_path}/step-*.safetensors"
    assert [spec[-16:-12] for spec in matching(pattern)] == ["-900", "1000"]
    assert "between step 0 and step 1" in invoke(pattern)


def test_a_run_and_two(run: Path, tmp_path: Path) -> None:
    out, html = tmp_path / "d.json", tmp_path / "d.html"
    text = invoke(run, "--out", out, "--html", html, "--measures", "atom_cosine,atom_grassmann")
    assert "conv1" in text
    assert "atom_grassmann" in text
    assert html.stat().st_size > 10_000
    found = sosie.load(out)
    np.testing.assert_array_equal(found.matrix("atom_cosine"), sosie.dynamics(run).matrix())
    again = CliRunner().invoke(app, ["report", str(out), "--html", str(tmp_path / "again.html")])
    assert again.exit_code == 0
    assert "conv4" in again.output
    assert (tmp_path / "again.html").read_text() == html.read_text()
    assert "are most alike at" in invoke(run, run, "--sites", "conv1,conv2")


def test_checkpoints_with_and_without_data(tmp_path: Path) -> None:
    paths = []
    for seed in range(3):
        torch.manual_seed(seed)
        paths.append(tmp_path / f"{seed}.safetensors")
        save_file(small_cnn().state_dict(), paths[-1])
    assert "weight_cosine" in invoke(*paths)
    models = [f"small_cnn@{path}" for path in paths]
    out = tmp_path / "d.json"
    assert "debiased_cka" in invoke(*models, "--data", "demo", "--max-rows", 32, "--sites", "fc", "--out", out)
    assert sosie.load(out)["debiased_cka"].n == 32


def test_checkpoints_have_the_steps_that_were_given(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("first", "second", "third")]
    for path in paths:
        save_file(small_cnn(width=4).state_dict(), path)
    out = tmp_path / "d.json"
    said = invoke(*paths, "--steps", "0,10,100", "--out", out)
    assert "no site came within 0.99 of its last state" in " ".join(said.split())
    found = sosie.load(out)
    assert found.steps == [0, 10, 100]
    assert set(found.settled(0.99).values()) == {None}  # random networks have nothing in common
    np.testing.assert_array_equal(found.matrix(), sosie.dynamics(paths).matrix())
    invoke(*paths, "--out", out)
    assert sosie.load(out).steps == [0, 1, 2]


def test_what_cannot_be_is_told(run: Path, tmp_path: Path) -> None:
    for words, match in [
        ([run, "small_cnn"], "is a recorded run and small_cnn is not"),
        ([run, run, run], "one run, or two"),
        ([tmp_path], "has no run.json"),
        ([run, "--data", "demo"], "data= was decided"),
        ([run, "--steps", "0"], "recorded run with its own steps"),
        (["small_cnn", "small_cnn", "--steps", "0,1,2"], "got 3 for 2"),
        (["small_cnn", "small_cnn", "--steps", "5,5"], "steps must increase"),
        (["small_cnn", "small_cnn", "--steps", "a,b"], "whole numbers of at least 0"),
        (["small_cnn", "small_cnn", "--steps", "-1,0"], "whole numbers of at least 0"),
        (["small_cnn"], "Name two checkpoints or more"),
        ([tmp_path / "nowhere"], "nowhere: no such folder"),
    ]:
        found = CliRunner().invoke(app, ["dynamics", *map(str, words)])
        assert found.exit_code != 0
        assert match in str(found.exception)
