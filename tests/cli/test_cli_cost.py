"""`sosie cost` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sosie.cli.main import app


def run(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["cost", *arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        return f"error: {found.exception}"
    return found.output


def test_the_table_and_the_file(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    model = "small_cnn(atoms=6, width=4, size=16)"
    printed = run(
        model, "--measures", "atom_cosine,linear_cka", "--probes", "8,16", "--shape", "1x16x16", "--out", str(out)
    )
    lines = [line.split() for line in printed.splitlines()]
    atoms = next(line for line in lines if line[:1] == ["atom_cosine"])
    assert atoms[1:6] == ["none", "1.19", "k", "0", "1.19"]
    assert [line[1] for line in lines if line[:1] == ["linear_cka"]] == ["8", "16"]
    assert "Elementwise work is not counted" in " ".join(printed.split())
    assert f"wrote {out}" in printed.replace("\n", "")
    saved = json.loads(out.read_text("utf-8"))
    assert [row["probes"] for row in saved["costs"]] == [None, 8, 16]
    again = CliRunner().invoke(app, ["report", str(out)])
    assert again.exit_code == 0
    assert "atom_cosine" in again.output


def test_mistakes_are_told() -> None:
    assert "100,1000" in run("small_cnn", "--probes", "many")
    assert "linear_cka" in run("small_cnn", "--measures", "linear_ckaa")


def test_a_model_without_atoms_has_measures_too() -> None:
    printed = run("small_cnn(width=2, size=8)", "--probes", "8", "--shape", "1x8x8")
    assert [line.split()[0] for line in printed.splitlines() if " M " in line or " k " in line] == [
        "cca_r2",
        "linear_cka",
        "wcka",
    ]
