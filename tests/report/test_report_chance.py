"""What chance gives, on the page in a real browser."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import numpy as np
import pytest
from report_examples import doubted, leaves, pair, side, similarity, stages
from test_report_browser import colour_at, expected_colour, saved

from sosie.results import Comparison

pytestmark = pytest.mark.browser

NOT_CLEAR = "not distinguishable from chance"


def unclear(**changes) -> Comparison:
    """Every number different; p and its correction disagree in one cell, the correction is unknown in another."""
    value = 0.1 + 0.8 * np.arange(12).reshape(3, 4) / 12
    value[1, 2] = np.nan
    p = np.array([[0.3, 0.21, 0.02, 0.012], [0.011, 0.009, 0.5, 0.07], [0.004, 0.003, 0.002, 0.0004]])
    search = np.array([[0.9, 0.6, 0.06, 0.0499], [0.0501, 0.03, 0.5, np.nan], [0.02, 0.01, 0.008, 0.0008]])
    facts = {"null": value / 5, "null_spread": value / 50, "p": p, "p_search": search}
    sites = [[f"{letter}{k}" for k in range(count)] for letter, count in (("a", 3), ("b", 4))]
    found = replace(similarity(value, **facts), **changes)
    return Comparison(side("first", sites[0]), side("second", sites[1]), {"alike": found})


UNCLEAR = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 3)}
NOTHING = dict.fromkeys(("null", "null_spread", "p", "p_search"))


def striped(seen, rows, columns):
    """Which cells lie under the striped shape."""
    code = """([x, y]) => { const path = document.querySelector("path.by-chance");
        const inside = () => new DOMPoint(x, y).matrixTransform(path.getScreenCTM().inverse());
        return Boolean(path) && path.isPointInFill(inside()); }"""
    return {(i, j) for i in range(rows) for j in range(columns) if seen.page.evaluate(code, list(seen.centre(i, j)))}


def column(seen, title):
    titles = seen.page.locator("table.layers thead th").all_inner_texts()
    k = [text.rstrip(" ↑↓") for text in titles].index(title) + 1
    return seen.page.locator(f"table.layers tbody td:nth-child({k})").all_inner_texts()


@pytest.mark.parametrize("width", [390, 1400])
def test_cells_that_chance_could_give_are_striped_and_the_legend_says_so(look, width):
    seen = look(unclear(), width=width)
    assert striped(seen, 3, 4) == UNCLEAR
    assert f"{NOT_CLEAR}: 5 of 12 pairs (p > 0.05, corrected for the search)" in seen.page.locator("main").inner_text()
    assert seen.page.locator("svg.heatmap .faded text").text_content() == NOT_CLEAR
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.complaints == []


def test_stripes_follow_the_plain_p_where_it_is_the_only_one(look):
    seen = look(unclear(p_search=None))
    assert striped(seen, 3, 4) == {(0, 0), (0, 1), (1, 3)}
    assert "not corrected for the search" in seen.page.locator("main").inner_text()
    assert "p, corrected" not in seen.page.locator("table.layers").inner_text()


def test_hovering_tells_what_chance_gives(look):
    seen = look(unclear())
    text = " ".join(seen.hover(1, 0).split())  # value 0.1 + 0.8 * 4 / 12
    value = 0.1 + 0.8 / 3
    assert f"0.3667 {value - 0.01 - 0.05 * (1 - value):.4f} to 0.4083 (95 %)" in text
    assert "Chance gives 0.0733 ± 0.0073 p 0.011 p, corrected for search 0.0501 Score 0.3165 " + NOT_CLEAR in text
    assert f"{(value - value / 5) / (1 - value / 5):.4f}" == "0.3165"
    clear = " ".join(seen.hover(2, 3).split())
    assert "p < 0.001 p, corrected for search < 0.001" in clear
    assert NOT_CLEAR not in clear


def test_a_click_or_enter_keeps_the_numbers_of_a_pair(look):
    seen = look(unclear())
    panel = seen.page.locator(".pinned")
    assert "Click a cell" in panel.inner_text()
    seen.page.mouse.click(*seen.centre(0, 2))
    kept = " ".join(panel.inner_text().split())
    assert kept.startswith("a0 and b2 Value 0.2333 95 % interval")
    assert "p, corrected for search 0.060 Score" in kept
    assert f"This value is {NOT_CLEAR}." in kept
    drawing = seen.page.locator("svg.heatmap")
    drawing.press("ArrowDown")
    assert f"p 0.500, {NOT_CLEAR}" not in seen.page.locator("#announcer").inner_text()  # it is undefined
    drawing.press("ArrowRight")
    assert f"p 0.070, score 0.5113, {NOT_CLEAR}." in seen.page.locator("#announcer").inner_text()
    drawing.press("Enter")
    assert panel.inner_text().startswith("a1 and b3")


def test_the_table_has_interval_chance_and_p(look):
    seen = look(unclear(p_search=np.full((3, 4), 0.2)))
    best = unclear()["alike"].value[[0, 1, 2], [3, 3, 3]]
    assert column(seen, "Value") == [f"{v:.3f} n.s." for v in best]
    assert column(seen, "Chance") == [f"{v / 5:.3f} ± {v / 50:.3f}" for v in best]
    assert column(seen, "p") == ["0.012", "0.070", "< 0.001"]
    assert column(seen, "p, corrected") == ["0.200"] * 3
    assert column(seen, "Score") == [f"{0.8 * v / (1 - v / 5):.3f}" for v in best]
    assert column(seen, "95 % interval")[0] == "0.255 to 0.345"
    header = seen.page.get_by_role("button", name="p", exact=True)
    header.click()
    assert column(seen, "p") == ["< 0.001", "0.012", "0.070"]


def test_the_map_switches_between_value_and_score(look):
    comparison = unclear()
    seen = look(comparison)
    values = comparison["alike"]
    for chosen, shown in (("#drawn-score", values.score), ("#drawn-value", values.value)):
        seen.page.locator(chosen).check(force=True)
        assert seen.page.locator(chosen).is_checked()
        for i, j in ((1, 1), (2, 0), (2, 3)):
            assert np.abs(np.array(colour_at(seen, i, j)) - expected_colour(shown[i, j])).max() <= 4
        numbers = seen.page.locator("svg.heatmap .numbers text").all_text_contents()
        assert numbers == [f"{v:.2f}" for v in shown.ravel() if np.isfinite(v)]
        assert striped(seen, 3, 4) == UNCLEAR
        assert f"{values.value[2, 3]:.4f}" in seen.hover(2, 3)  # the tooltip has both in any case
    assert seen.complaints == []


def test_scores_of_distances_rise_with_likeness(look):
    comparison = doubted(stages(4), stages(4))
    score = comparison["procrustes_angle"].score
    assert score[0, 0] > score[0, 1] > score[0, 3]
    seen = look(comparison)
    seen.page.get_by_role("tab", name="procrustes_angle").click()
    seen.page.locator("#drawn-score").check(force=True)
    assert "runs backwards" not in seen.page.locator("main").inner_text()
    brightness = [sum(colour_at(seen, 0, j)) for j in (3, 1, 0)]
    assert brightness == sorted(brightness)
    seen.page.get_by_role("tab", name="mutual_knn").click()  # what it gives for the same is not known
    assert seen.page.locator(".switch").count() == 0


def heights(seen, selector):
    """The numbers of a path's points, top first, in pixels of the drawing."""
    d = seen.page.locator(selector).first.get_attribute("d")
    return sorted({float(point.split()[1]) for point in d.strip("MZ").split("L")})


def test_the_curve_has_a_band_for_the_interval_and_one_for_chance(look):
    facts = {"null": np.full((3, 4), 0.25), "null_spread": np.full((3, 4), 0.125)}
    seen = look(unclear(**facts))
    seen.page.get_by_label("Whole range").check()
    top, bottom = 28.0, 238.0  # of a scale from 1 to 0
    at = lambda value: pytest.approx(bottom + (top - bottom) * value, abs=0.06)  # noqa: E731
    assert heights(seen, "svg.curve .line-chance .band") == [at(0.375), at(0.125)]
    assert heights(seen, "svg.curve .line-chance .stroke") == [at(0.25)]
    assert seen.page.locator("svg.curve .line-depth .band").count() == 2  # interrupted by an undefined layer
    value = 0.1  # of a0 and b0
    spread = 0.01 + 0.05 * 0.9
    assert heights(seen, "svg.curve .line-depth .band") == [at(value + spread), at(value - spread)]
    seen.page.locator("#drawn-score").check(force=True)
    spread = 0.125 / 0.75
    low = (0.1 - 0.055 - 0.25) / 0.75  # the scale widens to what is drawn: the lower end of the first interval
    at = lambda value: pytest.approx(top + (bottom - top) * (1 - value) / (1 - low), abs=0.06)  # noqa: E731
    assert heights(seen, "svg.curve .line-chance .band") == [at(spread), at(-spread)]
    assert heights(seen, "svg.curve .line-chance .stroke") == [at(0)]


def test_without_chance_the_page_has_none_of_it(look):
    seen = look(unclear(**NOTHING))
    assert seen.page.locator(".switch, .faded, .line-chance, .table-note").count() == 0
    assert "chance" not in seen.page.locator("table.layers").inner_text().lower()
    text = seen.page.locator("main").inner_text()
    assert NOT_CLEAR not in text
    assert "p, corrected" not in text
    assert NOT_CLEAR not in seen.hover(0, 0)


def test_nothing_is_rounded_twice_and_small_values_have_numbers(look):
    value = np.array([[0.62349, 0.84496, 0.00432], [-0.0031, 0.0, 0.12345]])
    sites = [["a0", "a1"], ["b0", "b1", "b2"]]
    plain = similarity(value, doubt=False)
    comparison = Comparison(
        side("a", sites[0]), side("b", sites[1]), {"m": plain, "tiny": replace(plain, value=value / 1e4)}
    )
    seen = look(comparison)
    numbers = seen.page.locator("svg.heatmap .numbers text")
    assert numbers.all_text_contents() == ["0.62", "0.84", "0.00", "0.00", "0.00", "0.12"]
    assert column(seen, "Value") == ["0.845", "0.123"]
    values = {"m": replace(plain, value=np.where(value == 0.84496, 0.623496, value))}
    assert column(look(replace(comparison, values=values)), "Value") == ["0.623", "0.123"]
    seen.page.get_by_role("tab", name="tiny").click()
    seen.page.get_by_label("Stretch").check()
    assert numbers.all_text_contents() == ["6.2e-5", "8.4e-5", "4.3e-7", "-3.1e-7", "0", "1.2e-5"]


def test_a_table_wider_than_the_screen_says_so(look):
    seen = look(doubted(stages(4), stages(4)), width=390)
    seen.page.get_by_text("Scroll sideways for more columns").wait_for()
    seen.page.get_by_text("Scroll sideways for more measures").wait_for()
    host = seen.page.locator(".scroll-host").last
    assert host.get_attribute("data-right") is not None
    assert host.get_attribute("data-left") is None
    area = seen.page.locator(".layers-scroll")
    area.evaluate("(area) => { area.scrollLeft = area.scrollWidth; }")
    seen.page.wait_for_selector(".panel .scroll-host[data-left]:not([data-right])")
    wide = look(doubted(stages(4), stages(4)), width=1400)
    assert not wide.page.get_by_text("Scroll sideways for more columns").is_visible()


@pytest.mark.parametrize("sites", [4, 126])
def test_paper_holds_every_column(look, sites):
    names = leaves(sites)
    seen = look(doubted(names, names), width=718)  # A4 less its margins
    seen.page.emulate_media(media="print")
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 718
    assert seen.page.locator("path.by-chance:visible").count() == 3
    assert not seen.page.locator(".switch, .hint, .scroll-hint").first.is_visible()


def test_saved_files_have_chance_too(look):
    comparison = unclear()
    seen = look(comparison)
    rows = list(csv.DictReader(io.StringIO(saved(seen, "CSV")[1].decode())))
    for row, wanted in zip(rows, comparison.rows(), strict=True):
        for kind in ("value", "low", "high", "null", "null_spread", "p", "p_search", "score"):
            number = float(row[kind]) if row[kind] else np.nan
            assert number == pytest.approx(wanted[kind], rel=1e-6, nan_ok=True)
    drawing = saved(seen, "SVG")[1].decode()
    assert NOT_CLEAR in drawing
    assert 'fill="url(#chance)"' in drawing
    assert 'id="chance"' in drawing


def test_chance_without_p_decides_nothing(look):
    seen = look(pair(stages(4), stages(4)))
    assert seen.page.locator("path.by-chance").count() == 0
    assert "Chance" in seen.page.locator("table.layers").inner_text()
