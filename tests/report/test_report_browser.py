"""The page in a real browser: what a reader sees, points at and saves."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest
from report_examples import HOSTILE, doubted, leaves, pair, several, side, similarity, stages, transformer

from sosie.report.colour import RAMP
from sosie.results import Caveat, Comparison, Comparisons

pytestmark = pytest.mark.browser


def crooked(rows: int = 3, columns: int = 5) -> Comparison:
    """Every cell different, nothing symmetric, one undefined."""
    value = 0.05 + 0.9 * np.arange(rows * columns).reshape(rows, columns) / (rows * columns)
    other = 2.0 - value
    value[1, 3] = np.nan
    caveats = (Caveat("features do not vary", "a1", "b3"), Caveat("few rows", site_b="b4"))
    a, b = [f"a{i}" for i in range(rows)], [f"b{j}" for j in range(columns)]
    distance = similarity(other, doubt=False, closer="down", bounds=(0.0, 2.0), same=0.0)
    values = {"alike": similarity(value, caveats=caveats, null=value / 10), "apart": distance}
    return Comparison(side("first", a), side("second", b), values)


def colour_at(seen, i, j):
    code = """([x, y]) => document.elementsFromPoint(x, y).map((e) => e.getAttribute("fill"))
        .find((fill) => fill?.startsWith("rgb"))"""
    x, y = seen.centre(i, j)
    return tuple(int(part) for part in seen.page.evaluate(code, [x, y - 9]).strip("rgb()").split(","))


def expected_colour(part):
    at = part * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    ends = np.array([[int(RAMP[k][c : c + 2], 16) for c in (1, 3, 5)] for k in (low, low + 1)])
    return ends[0] + (at - low) * (ends[1] - ends[0])


def test_hovering_tells_the_value_of_the_cell_under_the_labels(look):
    comparison = crooked()
    seen = look(comparison)
    for i, j in [(0, 0), (0, 4), (2, 0), (1, 2), (2, 4), (2, 3)]:
        text = seen.hover(i, j)
        values = comparison["alike"]
        assert f"{values.value[i, j]:.4f}" in text
        assert f"{values.low[i, j]:.4f} to {values.high[i, j]:.4f}" in text
        assert f"Chance gives {values.null[i, j]:.4f}" in " ".join(text.split())
        assert text.index(f"a{i}") < text.index(f"b{j}")
        assert ("few rows" in text) == (j == 4)
        assert np.abs(np.array(colour_at(seen, i, j)) - expected_colour(values.value[i, j])).max() <= 4
    assert seen.complaints == []
    assert seen.requests == [seen.path.as_uri()]


def test_an_undefined_cell_is_hatched_and_explained(look):
    seen = look(crooked())
    text = seen.hover(1, 3)
    assert "undefined" in text
    assert "features do not vary" in text
    assert "Hatched cells are undefined" in seen.page.locator("main").inner_text()
    code = "([x, y]) => document.elementsFromPoint(x, y).some((e) => e.classList.contains('undefined'))"
    assert seen.page.evaluate(code, list(seen.centre(1, 3)))
    assert not seen.page.evaluate(code, list(seen.centre(1, 2)))


def test_tabs_change_the_measure_and_alike_stays_bright(look):
    seen = look(crooked())
    seen.page.get_by_role("tab", name="apart").click()
    assert seen.page.locator("[aria-selected=true]").inner_text() == "apart"
    assert "1.4700" in seen.hover(1, 3)
    assert "runs backwards" in seen.page.locator("main").inner_text()
    brightness = [sum(colour_at(seen, i, j)) for i, j in ((0, 0), (1, 0), (2, 4))]
    assert brightness == sorted(brightness)  # distances fall from the first cell to the last
    seen.page.get_by_role("tab", name="apart").press("ArrowRight")
    assert seen.page.locator("[aria-selected=true]").inner_text() == "alike"
    assert seen.complaints == []


def test_stretching_spreads_the_colours(look):
    seen = look(crooked())
    before = colour_at(seen, 0, 0)
    seen.page.get_by_label("Stretch").check()
    assert seen.page.get_by_label("Stretch").is_checked()
    assert np.abs(np.array(colour_at(seen, 0, 0)) - expected_colour(0.0)).max() <= 4
    assert colour_at(seen, 0, 0) != before
    assert "stretched to the values found" in seen.page.locator("main").inner_text()


def test_arrow_keys_walk_the_cells_and_say_where_they_are(look):
    seen = look(crooked())
    drawing = seen.page.locator("svg.heatmap")
    drawing.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        drawing.press(key)
    said = seen.page.locator("#announcer").inner_text()
    assert said.startswith("a1 and b1: 0.4100, between")
    drawing.press("End")
    assert "few rows" in seen.page.locator("#announcer").inner_text()


def test_the_curve_names_the_partners(look):
    seen = look(crooked())
    area = seen.page.locator("svg.curve").bounding_box()
    seen.page.mouse.move(area["x"] + area["width"] * 0.95, area["y"] + 100)
    text = " ".join(seen.page.locator(".tip").inner_text().split())
    assert "a2" in text
    assert "best match 0.8900" in text
    assert "b4" in text


def test_the_table_sorts_and_keeps_undefined_last(look):
    seen = look(crooked())
    column = lambda k: seen.page.locator(f"table.layers tbody td:nth-child({k})").all_inner_texts()  # noqa: E731
    assert column(1) == ["a0", "a1", "a2"]
    header = seen.page.get_by_role("button", name="Value")
    header.click()
    header.click()
    assert column(3) == ["0.890", "0.590", "0.290"]
    assert column(8) == ["2", "2", "2"]  # the caveat's number in the list below


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_names_are_shown_and_do_nothing(look, scheme):
    names = (HOSTILE[0], HOSTILE[1])
    seen = look(doubted(HOSTILE, HOSTILE[::-1], names=names), width=360, color_scheme=scheme)
    seen.page.locator("svg.heatmap").focus()
    for _ in range(len(HOSTILE)):
        seen.page.keyboard.press("ArrowDown")
        seen.page.keyboard.press("ArrowRight")
        seen.page.keyboard.press("Enter")
    assert seen.complaints == []
    assert seen.requests == [seen.path.as_uri()]
    assert seen.page.title().startswith(HOSTILE[0])
    assert seen.page.locator("img, script[src], iframe, body > svg").count() == 0
    shown = seen.page.locator("body").inner_text()
    for name in (HOSTILE[0], HOSTILE[1], "{{7*7}}", "[red]x[/red]", "right<U+202E>to left", "(no name)"):
        assert name in shown


@pytest.mark.parametrize("sizes", [(2, 2), (9, 27), (60, 3), (126, 126)])
@pytest.mark.parametrize("width", [360, 1360])
def test_labels_do_not_overlap_and_the_page_does_not_overflow(look, sizes, width):
    rows, columns = sizes
    seen = look(pair(leaves(rows), transformer(columns)), width=width)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    drawing = seen.page.locator("svg.heatmap")
    area = drawing.bounding_box()
    boxes = [label.bounding_box() for label in drawing.locator("text[data-row]").all()]
    assert len(boxes) >= min(rows, 8)
    for above, below in pairwise(boxes):
        assert above["y"] + above["height"] <= below["y"] + 1
    feet = drawing.locator("text[data-column]")
    places = [float(x) for x in feet.evaluate_all("labels => labels.map((label) => label.getAttribute('x'))")]
    assert len(places) >= min(columns, 6)
    leaning = feet.first.get_attribute("transform") is not None
    apart = np.diff(places) * (np.sqrt(0.5) if leaning else 1)
    assert (apart >= 11).all()
    for box in (*boxes, *(label.bounding_box() for label in feet.all())):
        assert box["x"] >= area["x"] - 1
        assert box["x"] + box["width"] <= area["x"] + area["width"] + 1
    assert seen.complaints == []


def test_shortened_labels_keep_the_number_and_the_full_name(look):
    seen = look(pair(stages(9), transformer(36)))
    label = seen.page.locator("svg.heatmap text[data-column='33']")
    assert label.locator("title").text_content() == "encoder.layers.encoder_layer_11.self_attention"
    assert label.text_content().endswith("…layer_11.self_attention")


def saved(seen, name):
    with seen.page.expect_download() as found:
        seen.page.get_by_role("button", name=name, exact=True).first.click()
    return found.value.suggested_filename, found.value.path().read_bytes()


def test_downloads_work_offline(look):
    comparison = crooked()
    formula = Comparison(side("=first", ["=SUM(A1)", "a1", "a2"]), comparison.side_b, {"alike": comparison["alike"]})
    seen = look(formula)
    seen.page.context.set_offline(True)
    name, content = saved(seen, "CSV")
    assert name == "first-second-alike.csv"
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert len(rows) == 15
    assert rows[0]["site_a"] == "'=SUM(A1)"
    assert (rows[7]["site_a"], rows[7]["site_b"], rows[7]["value"]) == ("a1", "b2", "0.47")
    assert rows[8]["value"] == rows[8]["score"] == ""
    assert float(rows[7]["score"]) == pytest.approx(0.423 / 0.953, rel=1e-6)
    name, content = saved(seen, "SVG")
    assert ElementTree.fromstring(content).tag.endswith("svg")
    name, content = saved(seen, "PNG")
    assert content.startswith(b"\x89PNG")
    assert seen.complaints == []


def test_a_pair_of_several_models_is_picked_in_the_matrix(look):
    result = several(4)
    seen = look(result)
    assert f"{result.matrix('debiased_cka')[3, 1]:.4f}" in seen.hover(3, 1)
    seen.page.mouse.click(*seen.centre(3, 1))
    assert seen.page.locator("h2:visible").inner_text() == "seed-1 and seed-3"
    assert f"{result[1, 3]['debiased_cka'].value[2, 5]:.4f}" in seen.hover(2, 5, which=1)
    seen.page.locator("#picker").select_option("seed-0 and seed-2")
    assert f"{result[0, 2]['debiased_cka'].value[2, 5]:.4f}" in seen.hover(2, 5, which=1)
    assert seen.complaints == []


def test_a_value_of_two_models_is_a_mean_only_over_layers(look):
    caption = "figure.models figcaption"
    assert "mean over layers at the same depth" in look(several(3)).page.locator(caption).inner_text()
    outputs = Comparisons(("a", "b"), {(0, 1): pair(["logits"], ["logits"], names=("a", "b"))})
    assert "mean" not in look(outputs).page.locator(caption).inner_text()


def test_paper_shows_every_measure(look):
    seen = look(pair(stages(4), stages(4)))
    seen.page.emulate_media(media="print")
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.page.locator("svg.heatmap:visible").count() == 3
    assert not seen.page.locator(".tools").first.is_visible()
    seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert seen.page.locator("svg.heatmap").count() == 1


def test_every_figure_can_be_saved_and_tabs_say_that_they_go_on(look):
    seen = look(doubted(stages(6), stages(6)), width=360)
    assert seen.page.get_by_text("Scroll sideways for more measures").is_visible()
    figures = seen.page.locator("main figure")
    for k in range(figures.count()):
        for kind in ("CSV", "SVG", "PNG"):
            with seen.page.expect_download() as found:
                figures.nth(k).get_by_role("button", name=kind, exact=True).click()
            assert found.value.suggested_filename.endswith(kind.lower())
    seen.page.get_by_role("tab").first.press("ArrowLeft")  # the last, which lies outside
    in_view = "() => [...document.querySelectorAll('[role=tab]')].at(-1).getBoundingClientRect().right <= innerWidth"
    seen.page.wait_for_function(in_view)  # it scrolls
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert seen.complaints == []
