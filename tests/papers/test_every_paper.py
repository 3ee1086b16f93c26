"""What each paper's folder says fits together: claims, results, verdicts, README; and its figures are drawn one way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from paper_scripts import PAPERS

from claims import read_claims, read_number  # isort: skip

NAMES = sorted(path.parent.name for path in PAPERS.glob("*/expected.toml"))
each_paper = pytest.mark.parametrize("paper", [PAPERS / name for name in NAMES], ids=NAMES)


def verdicts(paper: Path) -> list[dict[str, Any]]:
    path = paper / "results" / "verdicts.json"
    if not path.is_file():
        pytest.skip("the paper's run has not been made yet")
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_there_are_papers() -> None:
    assert {"atoms", "ckasr", "frankenstein", "gradients", "wcka"} <= set(NAMES)


@each_paper
def test_every_claim_can_fail(paper: Path) -> None:
    claims = read_claims(paper / "expected.toml")
    assert len({claim.name for claim in claims}) == len(claims) > 0
    for claim in claims:
        outside = [edge + step for edge, step in ((claim.low, -1.0), (claim.high, 1.0)) if edge is not None]
        assert {claim.judge(value) for value in outside} == {"not reproduced"}
    for name in ("README.md", "run.py", "draw.py"):
        assert (paper / name).is_file()


@each_paper
def test_every_claim_was_judged_by_the_number_that_is_there(paper: Path) -> None:
    judged = {each["name"]: each for each in verdicts(paper)}
    claims = read_claims(paper / "expected.toml")
    assert list(judged) == [claim.name for claim in claims]
    for claim in claims:
        value = read_number(paper / "results", claim.measured)
        assert judged[claim.name]["value"] == value
        assert judged[claim.name]["verdict"] == claim.judge(value)


@each_paper
def test_the_readme_counts_as_the_verdicts_do(paper: Path) -> None:
    found = [each["verdict"] for each in verdicts(paper)]
    yes, no, missing = (found.count(word) for word in ("reproduced", "not reproduced", "not run"))
    text = " ".join((paper / "README.md").read_text("utf-8").split())
    assert f"Of {len(found)} claims" in text
    counted = f"{yes} were reproduced and {no} were not"
    assert (f"{counted}; {missing} were not run" if missing else counted) in text
    assert "not fully run" not in text


@each_paper
def test_only_an_experiment_without_results_is_not_run(paper: Path) -> None:
    found = verdicts(paper)
    asked = {each["measured"].partition("/")[0] for each in found}
    missing = {each["measured"].partition("/")[0] for each in found if each["verdict"] == "not run"}
    assert missing == {name for name in asked if not (paper / "results" / f"{name}.json").is_file()}


@each_paper
def test_results_are_plain_json(paper: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in a results file")

    for path in (paper / "results").glob("*.json"):
        json.loads(path.read_text("utf-8"), parse_constant=refuse)


def test_figures_are_drawn_of_the_results_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="figures need matplotlib")
    from drawing import draw_all, set_style

    def line(found: dict[str, Any]) -> Any:
        figure, axis = pyplot.subplots()
        axis.plot(found["y"])
        return figure

    with pyplot.rc_context():
        set_style({"font.size": 5})
        assert pyplot.rcParams["font.size"] == 5
        for folder in (tmp_path / "results", tmp_path / "elsewhere"):
            folder.mkdir()
            (folder / "one.json").write_text('{"y": [1, 2]}')
        monkeypatch.setattr(sys, "argv", ["draw.py"])
        draw_all(tmp_path, {"one": line, "two": line})
        monkeypatch.setattr(sys, "argv", ["draw.py", str(tmp_path / "elsewhere")])
        draw_all(tmp_path, {"one": line}, tight=True)
    here, there = tmp_path / "results" / "one.svg", tmp_path / "elsewhere" / "one.svg"
    assert capsys.readouterr().out.splitlines() == [str(here), str(there)]
    assert here.read_text() != there.read_text()  # one with little room around it
    assert not pyplot.get_fignums()
