"""Claims are ranges: in it, out of it, or not run; a run is judged by what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import paper_scripts  # noqa: F401
import pytest
from typer.testing import CliRunner

from sosie.cli.main import app

from claims import check_claims, read_claims  # isort: skip

EXPECTED = """
[both]
says = "Between."
measured = "one/x"
low = 0.2
high = 0.4
kind = "number"

[only-high]
says = "Small."
measured = "one/y"
high = 0.0
kind = "quality"

[elsewhere]
says = "Never run."
measured = "two/x"
low = 1
kind = "ours"
"""


def paper(folder: Path, text: str = EXPECTED) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "expected.toml").write_text(text)
    return folder


def write(folder: Path, x: float | None, y: float) -> None:
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / "one.json").write_text(json.dumps({"numbers": {"x": x, "y": y}}))


def judged(folder: Path) -> list[str]:
    return [found["verdict"] for found in check_claims(folder, folder / "results")]


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paper(tmp_path)
    assert judged(folder) == ["not run"] * 3
    write(folder, 0.2, 0.1)
    assert judged(folder) == ["reproduced", "not reproduced", "not run"]
    write(folder, 0.41, -0.1)
    assert judged(folder) == ["not reproduced", "reproduced", "not run"]
    write(folder, None, 0.0)  # an experiment that could not tell
    assert judged(folder) == ["not run", "reproduced", "not run"]
    assert "1 reproduced, 0 not reproduced, 2 not run" in capsys.readouterr().out
    stored = json.loads((folder / "results" / "verdicts.json").read_text())
    assert [each["verdict"] for each in stored] == ["not run", "reproduced", "not run"]
    assert stored[1]["value"] == 0.0


def test_a_number_that_is_missing_is_no_verdict(tmp_path: Path) -> None:
    folder = paper(tmp_path)
    (folder / "results").mkdir()
    (folder / "results" / "one.json").write_text(json.dumps({"numbers": {"z": 1.0}}))
    with pytest.raises(KeyError, match="no number 'x'; it has z"):
        judged(folder)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("low = 0.2\nhigh = 0.4\n", "low or high"),
        ('kind = "number"', "low or high"),
        ("high = 0.4", "low or high"),
        ('"number"', "kind is one of"),
    ],
)
def test_a_claim_that_says_too_little_is_refused(tmp_path: Path, wrong: str, told: str) -> None:
    better = {"high = 0.4": "hihg = 0.4", '"number"': '"certain"'}.get(wrong, "")
    folder = paper(tmp_path, EXPECTED.replace(wrong, better, 1))
    with pytest.raises(ValueError, match=told):
        read_claims(folder / "expected.toml")


def test_the_verb_lists_and_runs(tmp_path: Path) -> None:
    folder = paper(tmp_path / "made-up")
    write(folder, 0.3, 1.0)
    asked = ["papers", "--folder", str(tmp_path)]
    assert "3 claims, not run yet" in CliRunner().invoke(app, asked).stdout
    judged(folder)
    assert "3 claims: 1 reproduced, 1 not run, 1 not reproduced" in CliRunner().invoke(app, asked).stdout
    (folder / "run.py").write_text("import sys; sys.exit(7 if sys.argv[1:] == ['--only', 'x'] else 8)")
    assert CliRunner().invoke(app, [*asked, "made-up", "--only", "x"]).exit_code == 7
    missing = CliRunner().invoke(app, [*asked, "nobody"])
    assert "there are made-up" in str(missing.exception)
