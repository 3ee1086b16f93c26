"""`sosie benchmark` as a user meets it: all measures at the smallest scale, then one of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sosie.cli.main import app
from sosie.measures import MEASURES
from sosie.stats import Atoms

MINE = """
def nearness(x, y):
    return -float(((x - y) ** 2).mean()) if x.shape == y.shape else -1.0
"""


def test_all_measures_then_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    found = CliRunner().invoke(app, ["benchmark", "--scale", "smoke", "--out", "bench"])
    assert found.exit_code == 0, f"{found.output} {found.exception!r}"
    rows = {row["measure"]: row for row in json.loads((tmp_path / "bench/leaderboard.json").read_text())["rows"]}
    # Atoms need models that share coefficients, which the benchmark's perceptrons have none of.
    elsewhere = {m.name for m in MEASURES.values() if not (m.reads_layers or m.reads_weights) or m.reads is Atoms}
    assert set(rows) == set(MEASURES) - elsewhere
    for name, row in rows.items():
        told = " ".join(row["failures"].values())
        infinite = MEASURES[name].few_rows == "infinite" and "infinite:" in told  # so small a network has such layers
        assert not told or "ImportError" in told or infinite, (name, told)
        undefined = " ".join(row["undefined"].values())
        assert not undefined or "equal widths" in undefined or "same tensors" in undefined, (name, undefined)
    assert rows["debiased_cka"]["rank"] is not None
    assert rows["debiased_cka"]["auc"] == 1
    assert rows["debiased_cka"]["untrained"] < rows["linear_cka"]["untrained"] + 1e-9 < 0.6
    assert "says best what networks do" in found.output or "comes first, but is not alone" in found.output
    page = (tmp_path / "bench/leaderboard.html").read_text()
    assert "debiased_cka" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")

    (tmp_path / "mine.py").write_text(MINE)
    again = CliRunner().invoke(app, ["benchmark", "mine.py:nearness", "--closer", "up", "--out", "bench"])
    assert again.exit_code == 0, f"{again.output} {again.exception!r}"
    assert "nearness" in again.output
    joined = {row["measure"] for row in json.loads((tmp_path / "bench/leaderboard.json").read_text())["rows"]}
    assert joined == {*rows, "nearness"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such"], "no measure is called"),
        (["linear_cka", "--scale", "vast"], "'smoke', 'small', 'paper'"),
        (["missing.py:f"], "no file missing.py"),
        (["agreement"], "judged"),
        (["relative_error"], "entry by entry"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["benchmark", *arguments])
    assert found.exit_code != 0
    assert message in str(found.exception)
    assert not (tmp_path / "benchmark").exists()
