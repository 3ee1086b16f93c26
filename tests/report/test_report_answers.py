"""Answers of a zoo as text and as pages: whole, escaped, and drawn where they lie."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sosie.report import print_answer, print_table, write_report
from sosie.results import Duplicates, Map, Neighbours, Recommendation

HOSTILE = "<img src=x onerror=alert(1)>"


def a_map(count: int = 12) -> Map:
    rows = [
        {"name": HOSTILE if k == 3 else f"net{k}", "id": k, "x": k / 10, "y": (k % 3) / 10,
         "architecture": f"Net{k % 2}", "parameters": 5, "task": None,
         "tags": ["</script>"] if k == 1 else [], "parent": None}
        for k in range(count)
    ]  # fmt: skip
    return Map({"kind": "cka", "stress": 0.1, "landmarks": None}, tuple(rows), ("A note.",))


def neighbours() -> Neighbours:
    row = {"name": HOSTILE, "site_a": "a", "site_b": "b", "value": 0.5, "estimated": 0.49, "exact": True, "tags": []}
    return Neighbours({"query": HOSTILE, "by": "model", "searched": 3}, (row,))


def test_names_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    for found in (a_map(), neighbours()):
        page = write_report(found, tmp_path / "a.html").read_text("utf-8")
        assert "<img" not in page
        assert page.count("</script>") == 2
        assert "default-src &#39;none&#39;" in page
        out = StringIO()
        print_answer(found, Console(file=out, width=100))
        assert found.sentence()[:30] in out.getvalue()
    assert Duplicates({"models": 2}, ()).sentence() == "None of 2 models is a duplicate."


def test_long_answers_are_cut_and_say_so() -> None:
    out = StringIO()
    print_answer(a_map(100), Console(file=out, width=100))
    assert "and 40 more" in out.getvalue()
    assert "60 more" in repr(a_map(100))


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1360])
def test_the_map_is_drawn_to_one_scale(look: Any, width: int) -> None:
    seen = look(a_map(), width=width)
    points = seen.page.locator("circle.point")
    assert points.count() == 12
    place = [(float(p.get_attribute("cx")), float(p.get_attribute("cy"))) for p in points.all()]
    across, up = place[9][0] - place[0][0], place[9][1] - place[0][1]  # 0.9 to the right, at the same height
    assert up == pytest.approx(0, abs=0.2)
    assert place[0][1] - place[1][1] == pytest.approx(across / 9, abs=0.3)  # 0.1 up
    assert HOSTILE in seen.page.locator("main").inner_text()
    points.nth(3).hover(force=True)
    assert HOSTILE in seen.page.locator(".tip").inner_text()
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert seen.complaints == []
    assert seen.requests == [seen.path.as_uri()]
    seen.page.get_by_text("tags", exact=True).first.click()
    assert seen.page.locator(".map-key li").count() == 2


@pytest.mark.browser
@pytest.mark.parametrize("width", [420, 1360])
def test_every_model_of_a_crowd_has_a_name_and_none_lies_on_another(look: Any, width: int) -> None:
    found = a_map(10)
    rows = [{**row, "name": f"resnet20-seed-{k}", "x": (k * 7 % 10) / 900, "y": (k % 3) / 300}
            for k, row in enumerate(found)]  # fmt: skip
    rows[-1] |= {"x": 1.0, "y": 0.3}
    seen = look(Map(found.asked, tuple(rows)), width=width)
    labels = seen.page.locator("svg text.label")
    assert labels.count() == 10
    boxes = [label.bounding_box() for label in labels.all()]
    for k, a in enumerate(boxes):
        for b in boxes[k + 1 :]:
            apart = a["x"] + a["width"] <= b["x"] + 1 or b["x"] + b["width"] <= a["x"] + 1
            assert apart or abs(a["y"] - b["y"]) >= 11
    assert seen.page.title() == "A map of 10 models"
    for kind in ("CSV", "SVG", "PNG"):
        with seen.page.expect_download():
            seen.page.get_by_role("button", name=kind, exact=True).click()
    assert seen.complaints == []


@pytest.mark.browser
def test_rows_are_shown(look: Any) -> None:
    seen = look(neighbours(), width=300)
    assert "0.5000" in seen.page.locator("table.answer").inner_text()
    assert seen.page.locator("h1").inner_text() == f"Nearest to {HOSTILE}"
    assert seen.page.locator(".scroll-hint").is_visible()
    with seen.page.expect_download() as saved:
        seen.page.get_by_role("button", name="CSV").click()
    assert "name,value" in saved.value.path().read_text("utf-8")
    assert seen.complaints == []


def recommendation(tried: int, failed: int) -> Recommendation:
    empty = {"probe_accuracy": None, "architecture": "Net", "task": None}
    rows = [{"name": f"net{k}", "rank": k + 1, "mean_embedding": 0.5, "reason": None, **empty} for k in range(tried)]
    why = f"no [red]such[/red] file {'x' * 90}"
    lost = [
        {"name": f"{HOSTILE}{k}", "rank": None, "mean_embedding": None, "reason": why, **empty} for k in range(failed)
    ]
    asked = {"by": "mean_embedding", "tried": tried, "failed": failed}
    return Recommendation(asked, tuple(rows[:5] + lost), ("A note.",))


def test_reasons_are_told_below_the_table_and_whole() -> None:
    out = StringIO()
    print_answer(recommendation(8, 2), Console(file=out, width=60))
    text = " ".join(out.getvalue().split())
    assert "Of 8 models net0 comes first by mean_embedding (0.5); 2 could not be tried." in text
    table, _, below = text.partition("net4")
    assert "reason" not in table
    assert HOSTILE not in table.replace(" ", "")
    assert below.replace(" ", "").count("no[red]such[/red]file" + "x" * 90) == 2
    out = StringIO()
    print_answer(recommendation(0, 70), Console(file=out, width=200))
    assert out.getvalue().count("no [red]such[/red] file") == 60
    assert "and 10 more" in out.getvalue()


def test_the_heading_of_the_page_counts_what_the_sentence_counts(tmp_path: Path) -> None:
    for found, said in ((recommendation(8, 2), "8 models"), (recommendation(1, 2), "1 model")):
        page = write_report(found, tmp_path / "a.html").read_text("utf-8")
        assert f">{said}</h1>" in page
        assert f"Of {said} net0" in page
    page = write_report(Duplicates({"models": 2}, ()), tmp_path / "a.html").read_text("utf-8")
    assert ">2 models</h1>" in page


def test_rounding_puts_no_cosine_past_1() -> None:
    row = {"name": "a", "value": 1.000000001, "estimated": 1 + 1e-5, "tags": []}
    found = Neighbours({"query": "q", "searched": 1}, (row,))
    assert found[0]["value"] == 1
    assert found[0]["estimated"] == 1 + 1e-5  # more than rounding: to be seen
    assert row["value"] > 1


def test_a_table_shortens_cells_and_cuts_none_off() -> None:
    row = {"name": "a-model-with-a-long-name", "aheadingwiderthancells": 1.0, "task": "patterns"}
    out = StringIO()
    print_table([row], console=Console(file=out, width=54))
    assert "patterns" in out.getvalue()
    assert "aheadingwiderthancells" in out.getvalue()
    assert "…" in out.getvalue()
