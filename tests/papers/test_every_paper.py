"""What each paper's folder says fits together: claims, results, verdicts, README; and its figures are drawn one way."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from paper_scripts import PAPERS, run

from claims import (  # isort: skip
    between,
    count,
    judge_all,
    papers_here,
    read_claims,
    read_settings,
    table,
    table_of_counts,
)
from scatter import Interval  # isort: skip

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
        for value in outside:
            assert claim.judge(value, Interval(value, value, "nothing")).outcome in ("contradicted", "undecided")
    for name in ("README.md", "run.py", "draw.py", "intervals.py"):
        assert (paper / name).is_file()


@each_paper
def test_verdicts_are_what_the_results_say(paper: Path) -> None:
    """Outcomes, intervals and reasons: `python papers/claims.py` writes them again."""
    found = json.loads(json.dumps(judge_all(paper, paper / "results")))
    for each, stored in zip(found, verdicts(paper), strict=True):
        near = {key: pytest.approx(value, rel=1e-6) for key, value in stored.items() if isinstance(value, float)}
        assert each == stored | near
    for each in found:
        assert each["reason"]
        decided = each["outcome"] in ("reproduced", "contradicted")
        assert not decided or each["interval_low"] is not None, each["name"]


@each_paper
def test_the_readme_has_the_table_of_the_verdicts(paper: Path) -> None:
    text = (paper / "README.md").read_text("utf-8")
    assert between(text, "claims", table(paper, verdicts(paper))) == text


def test_the_papers_page_counts_as_the_verdicts_do() -> None:
    text = (PAPERS / "README.md").read_text("utf-8")
    assert between(text, "counts", table_of_counts(papers_here())) == text


def test_the_essay_counts_as_the_verdicts_do() -> None:
    total: Counter[str] = Counter()
    text = " ".join((PAPERS.parent / "docs" / "papers.md").read_text("utf-8").split())
    for paper in papers_here():
        total += Counter(count(verdicts(paper))["the paper's"])
    assert f"{total.total()} claims" in text
    undecided = total["undecided"] + total["not run"]
    assert f"{total['reproduced']} were reproduced, {total['contradicted']} are contradicted" in text
    assert f"and {undecided} cannot be decided" in text


@each_paper
def test_only_an_experiment_without_results_is_not_run(paper: Path) -> None:
    found = verdicts(paper)
    asked = {each["measured"].partition("/")[0] for each in found}
    missing = {each["measured"].partition("/")[0] for each in found if each["outcome"] == "not run"}
    assert missing == {name for name in asked if not (paper / "results" / f"{name}.json").is_file()}


@each_paper
def test_a_setting_names_an_experiment_of_a_claim(paper: Path) -> None:
    asked = {claim.experiment for claim in read_claims(paper / "expected.toml")}
    assert set(read_settings(paper / "expected.toml")) <= asked


def test_what_was_run_in_part_is_what_its_records_hold(tmp_path: Path) -> None:
    stored = json.loads((PAPERS / "ckasr" / "results" / "table-5-full.json").read_text("utf-8"))["numbers"]
    copy = tmp_path / "papers"
    shutil.copytree(PAPERS / "ckasr", copy / "ckasr", ignore=shutil.ignore_patterns("nets", "small", "*.svg"))
    for shared in PAPERS.glob("*.py"):
        shutil.copy(shared, copy)
    run(copy / "ckasr" / "run.py", "--records")
    found = json.loads((copy / "ckasr" / "results" / "table-5-full.json").read_text("utf-8"))["numbers"]
    assert found == pytest.approx(stored)


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
