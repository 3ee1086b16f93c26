"""`sosie weights` on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

import sosie
from sosie.cli.main import app

JOINT = "--measures atom_cosine --joint 9 --null weights --draws 2"
NET = """
from torch import nn


def make(width=8):
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 3))
"""


def test_two_models_without_data(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    made = f"{tmp_path}/net.py:make"
    out, html = tmp_path / "c.json", tmp_path / "c.html"
    found = CliRunner().invoke(app, ["weights", made, f"{made}(width=5)", "--out", str(out), "--html", str(html)])
    assert found.exit_code == 0, found.output
    assert "wcka" in found.output
    assert html.stat().st_size > 1000
    loaded = sosie.load(out)
    assert loaded.matrix("wcka").shape == (3, 3)
    again = CliRunner().invoke(
        app, ["weights", made, f"{made}(width=5)", "--sites", "output", "--measures", "wcka_uncentred", "--shape", "12"]
    )
    assert again.exit_code == 0, again.output
    assert "wcka_uncentred" in again.output


def test_several_models(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    made = f"{tmp_path}/net.py:make"
    out = tmp_path / "c.json"
    found = CliRunner().invoke(app, ["weights", made, made, f"{made}(width=5)", "--out", str(out)])
    assert found.exit_code == 0, found.output
    np.testing.assert_allclose(sosie.load(out)[0, 1].matrix("wcka").diagonal(), 1, atol=1e-9)


def test_chance_stands_beside_the_value_of_joint_atoms() -> None:
    found = CliRunner().invoke(app, ["weights", "small_cnn(seed=0)", "small_cnn(seed=1)", *JOINT.split()])
    value = sosie.compare_weights(
        "small_cnn(seed=0)", "small_cnn(seed=1)", measures="atom_cosine", joint=9, null="weights", draws=2
    )["atom_cosine"]
    line = next(line.split() for line in found.output.splitlines() if line.strip().startswith("conv2"))
    assert value.null is not None
    assert value.null_spread is not None
    assert line == ["conv2", f"{value.value[1, 1]:.3f}", f"{value.null[1, 1]:.3f}±{value.null_spread[1, 1]:.3f}"]
