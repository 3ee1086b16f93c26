"""Results of stitching: the page, the terminal and the sentences show what the networks do beside what indices say."""

from __future__ import annotations

import io

import numpy as np
import pytest
from report_examples import HOSTILE, pair, side, similarity
from rich.console import Console

from sosie.report import print_comparison
from sosie.report.comparison import contents, render
from sosie.results import Caveat, Comparison, headline, in_order, indices, summarise

DOES = np.array([0.99, 0.81, 0.92])
SAYS = np.array([0.88, 0.72, 0.53])


def stitched(*, every: bool = False, sites: list[str] | None = None) -> Comparison:
    sites = sites or ["bn1", "bn2", "bn3"]
    count = len(sites)

    def placed(diagonal: np.ndarray) -> np.ndarray:
        matrix = np.full((count, count), 0.3 if every else np.nan)
        np.fill_diagonal(matrix, np.resize(diagonal, count))
        return matrix

    order = () if every else (Caveat("nothing off the diagonal"),)
    lost = similarity(placed(1 - DOES), doubt=False, closer="down", bounds=(0.0, None), same=None, caveats=order)
    values = {
        "relative_accuracy": similarity(placed(DOES), bounds=(0.0, None), caveats=order),
        "agreement_b": similarity(placed(DOES - 0.1), bounds=(0.0, 1.0), caveats=order),
        "cross_entropy": lost,
        "linear_cka": similarity(placed(SAYS), doubt=False, caveats=(*order, Caveat("positions hang together"))),
    }
    return Comparison(side("first", sites), side("second", sites), values, "positions", kind="stitching")


def test_which_values_say_what() -> None:
    c, plain = stitched(), pair(["a", "b"], ["a", "b"])
    assert headline(c) == "relative_accuracy"
    assert indices(c) == ["linear_cka"]
    assert headline(plain) is None
    assert in_order(c)
    assert not in_order(stitched(every=True))
    assert contents(c)["pairs"][0]["stitched"]["says"] == [3]
    assert contents(plain)["pairs"][0]["stitched"] is None


def test_sentences_speak_of_the_job() -> None:
    c = stitched()
    assert summarise(c, "relative_accuracy").sentence == (
        "With what first represents, second does its job best from bn1 on (relative_accuracy 0.99) "
        "and worst from bn2 on (0.81)."
    )
    assert summarise(c, "cross_entropy").sentence.startswith("By cross_entropy, best from bn1 on (0.01), worst")
    assert "best match" not in summarise(c, "linear_cka").sentence
    assert "best match" in summarise(stitched(every=True), "linear_cka").sentence


@pytest.mark.parametrize("width", [50, 80, 140])
def test_one_table_for_layers_in_order(width: int) -> None:
    stream = io.StringIO()
    print_comparison(stitched(), Console(file=stream, width=width, legacy_windows=False))
    text = stream.getvalue()
    for cell in ("bn2", "0.810", "0.710", "0.720", "0.190"):
        assert cell in text
    assert ("[0.791, 0.830]" in text) == (width > 50), text
    assert text.count("nothing off the diagonal") == 1
    assert "positions hang together (linear_cka)" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width


def test_hostile_names_do_no_harm() -> None:
    c = stitched(sites=HOSTILE)
    stream = io.StringIO()
    print_comparison(c, Console(file=stream, width=100))
    assert "\x1b[31mterminal" not in stream.getvalue()
    assert "</script><img" not in render(c)


@pytest.mark.browser
def test_the_page_draws_one_against_the_other(look) -> None:
    seen = look(stitched())
    figures = seen.page.locator(".stitched figure")
    assert figures.count() == 2
    assert figures.nth(1).locator("circle.scatter").count() == 3
    assert figures.nth(1).locator(".legend").all_inner_texts() == ["linear_cka"]
    assert "Large dots" not in figures.nth(1).inner_text(), "all are of the same size"
    assert seen.page.locator("svg.heatmap").count() == 0, "a map with nothing but a diagonal is not drawn"
    figures.nth(1).scroll_into_view_if_needed()
    seen.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    box = figures.nth(1).locator("circle.scatter").nth(1).bounding_box()
    seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = seen.page.locator(".tip").inner_text()
    assert "0.810" in tip
    assert "0.720" in tip
    assert tip.count("bn2") == 2
    assert seen.complaints == []
    every = look(stitched(every=True))
    assert every.page.locator(".stitched circle.scatter").count() == 9
    assert "Large dots" in every.page.locator(".stitched").inner_text()
    assert every.page.locator("svg.heatmap").count() == 1
    assert every.complaints == []


def axis(seen, which: str) -> list[float]:
    return [float(text) for text in seen.page.locator(f"{which} .grid text").all_text_contents()]


@pytest.mark.browser
def test_axes_fit_the_values_and_show_what_each_network_reaches(look) -> None:
    found = stitched()
    found.provenance["accuracy"] = [0.6, 0.75]
    seen = look(found)
    assert seen.page.title() == "first and second, stitched"
    curve = seen.page.locator("figure", has_text="From the first layer to the last")
    assert curve.count() == 1, "the same curve once"
    assert [text for text in curve.locator(".legend").all_inner_texts() if "itself" in text] == [
        "first itself",
        "second itself",
    ]
    fitted = axis(seen, "figure:has(.line-depth)")
    assert min(fitted) >= 0.7
    seen.page.get_by_label("Whole range").first.check()
    assert min(axis(seen, "figure:has(.line-depth)")) == 0
    seen.page.get_by_role("tab", name="linear_cka").click()
    assert seen.page.locator(".legend", has_text="itself").count() == 0
    assert seen.complaints == []
