"""A leaderboard on the terminal and as a page: in order, whole, and harmless whatever a measure is called."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from report_examples import HOSTILE
from rich.console import Console

from sosie.report import print_leaderboard
from sosie.report.benchmark import sentences
from sosie.results import Entry, Leaderboard

KINDS = {"seed": 30, "epoch": 20}


def correlations(value: float) -> dict[str, Any]:
    one = {
        "value": value,
        "low": value - 0.1,
        "high": value + 0.1,
        "p": 0.01,
        "n": 30,
        "over_models": [value - 0.2, value + 0.2],
    }
    return {"spearman": one, "pearson": {**one, "value": value / 2, "over_models": None}}


def entry(name: str, value: float, *, auc: float = 1.0, moved: float = 0.5, difference: float | None = None) -> Entry:
    lot = {"n": 9, "mean": 0.4, "quantiles": [0.2, 0.3, 0.4, 0.5, 0.6]}
    summary = {"auc": auc, "alike": {**lot, "mean": 0.95, "quantiles": [0.9] * 5}, "unlike": lot, "undefined": {}}
    tried = {
        "rescaled": {"keeps": True, "about": "neurons rescaled", "agreement": 1.0, "value": 0.7, "moved": moved},
        "rolled": {"keeps": False, "about": "classes rolled", "agreement": 0.0, "value": 1.0, "moved": 0.25},
        "rows": {"keeps": True, "about": "rows moved", "agreement": 1.0, "why": "is done to activations"},
    }
    reach = (
        {"value": difference, "p": 0.2, "over_models": [difference - 0.1, difference + 0.1], "n": 30}
        if difference is not None
        else None
    )
    return Entry(
        name,
        "activations",
        "up",
        notes=("sees at most 60 of 120 images",),
        calibration={
            "number": 60,
            "clean": summary,
            "numbers": [[10, {**summary, "auc": 0.75}], [60, summary]],
            "kinds": {"fog": summary},
            "seconds": [[10, 2e-5], [60, 0.004]],
        },
        grounding={
            kind: {"values": [0.1], "pairs": n, "defined": n, "undefined": {},
                   "groups": {"all": correlations(value), "clean": correlations(value - 0.3)}, "conditions": {}}
            for kind, n in KINDS.items()
        },
        against={} if reach is None else dict.fromkeys(KINDS, reach),
        manipulation={"same": 1.0, "far": 0.4, "manipulations": tried},
    )  # fmt: skip


def board(*entries: Entry) -> Leaderboard:
    data = {
        "name": "demo",
        "train": 300,
        "test": 120,
        "networks": 36,
        "runs": 12,
        "untrained": 6,
        "consecutive_pairs": 6,
    }
    conditions = {"all": ["clean"], "clean": ["clean"]}
    return Leaderboard({"name": "smoke"}, data, KINDS, conditions, entries, {"agreement": "reads outputs"}, {"seed": 0})


def example() -> Leaderboard:
    failed = Entry(HOSTILE[0], "models", None, failures={"direction": "RuntimeError: no luck"})
    return board(
        failed,
        entry("second", 0.5, moved=1.5, difference=-0.05),
        entry("third", 0.2, auc=0.8, difference=-0.4),
        entry("first", 0.7),
    )


def test_the_best_come_first_and_failures_last() -> None:
    found = example()
    assert [e.name for e in found] == ["first", "second", "third", HOSTILE[0]]
    assert found.leader == "first"
    row = found.rows()[1]
    assert (row["rank"], row["spearman"], row["pearson"], row["auc"]) == (2, 0.5, 0.25, 1.0)
    assert (row["moved_in_vain"], row["noticed"], row["seconds"]) == (1.5, 0.25, 0.004)
    assert found.rows()[3]["rank"] is None


def test_what_it_comes_to_in_words() -> None:
    found = sentences(example())
    assert "first comes first, but is not alone: Spearman’s ρ of 0.70" in found[0]
    apart = board(entry("first", 0.7), entry("third", 0.2, difference=-0.4))
    assert "first says best what networks do" in sentences(apart)[0]
    assert "seed and epoch" in found[0]
    assert "1 of the other 2 measures cannot be distinguished from it" in found[1]
    assert "2 of 4 separate consecutive checkpoints" in found[2]
    assert "1 of 3 could be moved" in found[3]
    assert "1 of 4 failed" in found[5]
    assert sentences(board(Entry("x", "models", None)))[0].startswith("No measure could be tested")


def test_what_is_not_defined_has_no_rank_and_has_not_failed() -> None:
    why = "not defined for networks that differ in epoch: no tensors in common"
    whole = entry("weights", 0.9)
    partial = replace(whole, grounding={"seed": whole.grounding["seed"]}, undefined={"epoch": why})
    found = board(partial, entry("first", 0.7))
    assert found.leader == "first"
    assert found.rows()[1]["rank"] is None
    said = sentences(found)
    assert "1 of 2 is not defined for networks that differ in epoch, and without a rank: weights." in said
    assert not any("failed" in one for one in said)
    text = io.StringIO()
    print_leaderboard(found, Console(file=text, width=120))
    assert f"- weights: {why}" in text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    text = io.StringIO()
    print_leaderboard(example(), Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert any("second" in line and "0.50" in line and "1.50" in line for line in lines)
    assert "no luck" in text.getvalue()
    assert ("random" in next(line for line in lines if "AUC" in line)) == (width >= 100)


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1360])
def test_the_page_shows_everything_and_loads_nothing(look: Any, width: int) -> None:
    seen = look(example(), width=width)
    main = seen.page.locator("main")
    text = main.inner_text()
    for word in ("Leaderboard", "differ in seed", "Calibration", "Manipulation", "neurons rescaled", "Not tested"):
        assert word in text
    assert seen.complaints == []
    assert seen.requests == [seen.path.as_uri()]
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert main.locator(".mark").count() == 6  # three measures, two kinds of pairs


@pytest.mark.browser
def test_a_measure_opens_and_images_are_chosen(look: Any) -> None:
    seen = look(example())
    seen.page.get_by_role("button", name="second").first.click()
    assert "less that of first" in seen.page.locator("main").inner_text()
    dot = ".mark circle"
    before = seen.page.locator(dot).first.get_attribute("cx")
    seen.page.get_by_text("clean", exact=True).first.click()
    assert seen.page.locator(dot).first.get_attribute("cx") != before
    assert seen.complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 1360])
def test_the_words_of_a_drawing_do_not_touch(look: Any, width: int) -> None:
    seen = look(example(), width=width)
    figure = seen.page.locator("section", has_text="Does it say what networks do?")
    boxes = [text.bounding_box() for text in figure.locator("svg text").all()]
    assert len(boxes) >= 13
    for one, other in combinations(boxes, 2):
        across, down = (
            min(one[at] + one[size], other[at] + other[size]) - max(one[at], other[at])
            for at, size in (("x", "width"), ("y", "height"))
        )
        assert across <= 0 or down <= 2, (one, other)


@pytest.mark.browser
def test_columns_sort(look: Any) -> None:
    seen = look(example())
    seen.page.get_by_role("button", name="AUC").first.click()
    names = seen.page.locator(".ranking").first.locator("tbody tr").all_inner_texts()
    assert "third" in names[0]


@pytest.mark.browser
def test_columns_say_what_they_mean_and_none_is_first_alone(look: Any) -> None:
    seen = look(example())
    table = seen.page.locator(".ranking").first
    heads = table.locator("th").all_inner_texts()
    assert all(len(head.splitlines()) > 1 for head in heads if not head.startswith("Measure")), heads
    places = [[head.split("\n")[0] for head in heads].index(name) for name in ("ρ seed", "Rank")]
    assert places == sorted(places)
    cells = table.locator("tbody tr").all_inner_texts()
    assert "1 =" in cells[0]
    assert "1 =" in cells[1]
    assert "1 =" not in cells[2]
    assert "0.50 to 0.90" in " ".join(cells[0].split())
