"""Dynamics on the terminal and as a page: the right numbers, a slider that moves everything, harmless names."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from report_examples import HOSTILE
from rich.console import Console

from sosie.report import print_dynamics
from sosie.report.dynamics import sentence, sparkline
from sosie.results import Caveat, Dynamics, Estimate

TIMES = 12


def example(sites: int = 4, *, upside_down: bool = False, two_runs: bool = False, names: Any = None) -> Dynamics:
    """Layer s comes to rest the later the larger s is; one state of the second layer is undefined."""
    pace = [1.0 + s for s in range(sites)]
    value = np.empty((sites, TIMES, TIMES))
    for s, slow in enumerate(pace[::-1] if upside_down else pace):
        angle = 1.2 * np.exp(-np.arange(TIMES) / slow)
        value[s] = np.cos(np.subtract.outer(angle, angle))
    distance = np.arccos(np.minimum(value, 1))
    if sites > 1:
        value[1, 2] = value[1, :, 2] = np.nan
    named = tuple(names or [f"conv{s}" for s in range(sites)])
    caveats = (Caveat("step 20: NaN", named[min(1, sites - 1)]),)
    values = {
        "atom_cosine": Estimate(value, 54, "the atoms themselves", "up", (-1.0, 1.0), 1.0, caveats=caveats),
        "weight_distance": Estimate(distance, 54, "the weights themselves", "down", (0.0, 2.0), 0.0),
    }
    steps = tuple(range(0, 10 * TIMES, 10))
    return Dynamics(
        "run", "run" if not two_runs else "other", "atoms", named, steps, steps, values, two_runs, {"sosie": "0"}
    )


def printed(found: Dynamics, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding, write_through=True)
    print_dynamics(found, Console(file=file, width=width))
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("upside_down", [False, True])
def test_what_it_comes_to_in_words(upside_down: bool) -> None:
    found = example(upside_down=upside_down)
    text = sentence(found, "atom_cosine")
    first, last = ("conv3", "conv0") if upside_down else ("conv0", "conv3")
    steps = found.settled()
    assert f"{first} moved most (0.362 between step 0 and step 110)" in text
    assert f"and came within 0.99 of its last state at step {steps[first]}; " in text
    assert steps[last] == 110 or f"{last} settled last (step {steps[last]})" in text
    assert ("top-down" if upside_down else "bottom-up") in text
    assert f"{-1 if upside_down else 1:+.2f} over 4 sites" in text
    both = sentence(example(two_runs=True), "weight_distance")
    assert both.startswith("At the end run and other are most alike at conv0 (0.000)")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_fits_and_holds_the_steps(width: int) -> None:
    found = example()
    text = printed(found, width)
    assert all(len(line) <= width for line in text.splitlines())
    line = next(line for line in text.splitlines() if line.strip().startswith("conv2"))
    words = line.replace("later", "None").split()
    assert words[1] == f"{found.to_end()[2, 0]:.3f}"
    assert words[2:4] == [str(found.settled(t)["conv2"]) for t in (0.99, 0.999)]
    assert "step 20: NaN (conv1)" in text
    assert "stays at or above the threshold" in " ".join(text.split())
    assert "a hundredth" in " ".join(text.split())


def test_small_curves_go_up_towards_the_end() -> None:
    assert sparkline(np.array([0.0, 0.5, 1.0]), 0.0, 1.0) == "▁▅█"
    assert sparkline(np.array([2.0, np.nan, 0.0]), 2.0, 0.0) == "▁ █"
    assert len(sparkline(np.linspace(0, 1, 500), 0.0, 1.0)) == 24
    assert sparkline(np.ones(3), 1.0, 1.0) == "███"
    assert sparkline(np.array([1 - 1e-7, 1.0]), 1 - 1e-7, 1.0) == "██"  # float32's rounding is no curve
    assert "#" in printed(example(), encoding="ascii")


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1360, "light"), (1360, "dark")])
def test_the_page_shows_everything_and_loads_nothing(look: Any, width: int, scheme: str) -> None:
    seen = look(example(), width=width, color_scheme=scheme)
    text = seen.page.locator("main").inner_text()
    for word in (
        "All layers at one step",
        "Every step against every other",
        "Settled at 0.999",
        "step 20: NaN",
        "Provenance",
    ):
        assert word in text
    assert seen.page.locator(".time-map").count() == 4
    assert seen.page.locator(".site-line").count() == 4
    assert seen.complaints == []
    assert seen.requests == [seen.path.as_uri()]
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def pixel(seen: Any, site: int, a: int, b: int) -> list[int]:
    code = """([s, a, b]) => {
        const copy = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(document.querySelectorAll(".time-map canvas")[s], -b, -a);
        return [...context.getImageData(0, 0, 1, 1).data];
    }"""
    return list(seen.page.evaluate(code, [site, a, b]))


@pytest.mark.browser
def test_maps_have_the_colour_of_their_values(look: Any) -> None:
    found = example()
    seen = look(found)
    value = found.matrix()
    bright = [sum(pixel(seen, 0, 0, b)[:3]) for b in range(TIMES)]
    assert bright == sorted(bright, reverse=True)  # the first state is less and less like later ones
    assert pixel(seen, 0, 0, 0)[3] == 255
    assert pixel(seen, 1, 2, 5)[3] == 0  # undefined: nothing is painted
    assert pixel(seen, 0, 0, TIMES - 1) != pixel(seen, 0, TIMES - 1, TIMES - 1)
    before = pixel(seen, 3, 0, 4)
    seen.page.get_by_label("Stretch").uncheck()
    assert pixel(seen, 3, 0, 4) != before
    assert value[0, 0, -1] < 0.4
    assert seen.complaints == []


@pytest.mark.browser
def test_the_slider_moves_a_cursor_through_all_maps_and_the_profile(look: Any) -> None:
    found = example()
    seen = look(found)
    for a, b in ((3, TIMES - 1), (7, 1)):
        seen.page.locator("#time-a").fill(str(a))
        seen.page.locator("#time-b").fill(str(b))
        paths = seen.page.locator(".time-map .cursor").evaluate_all("nodes => nodes.map((n) => n.getAttribute('d'))")
        assert paths == [f"M0 {a + 0.5}H{TIMES}M{b + 0.5} 0V{TIMES}"] * 4
        assert f"step {10 * a} against step {10 * b}" in seen.page.locator("main").inner_text()
        heights = seen.page.locator(".profile .dot").evaluate_all(
            "nodes => nodes.map((n) => Number(n.getAttribute('cy')))"
        )
        wanted = found.matrix()[:, a, b]
        assert np.corrcoef(heights, wanted)[0, 1] == pytest.approx(-1, abs=1e-3)  # up is alike
    assert seen.page.locator("#time-a").get_attribute("aria-valuetext") == "step 70"
    seen.page.locator("#time-b").press("End")
    assert "(last)" in seen.page.locator("#said-b").inner_text()
    assert seen.complaints == []


@pytest.mark.browser
def test_pointing_at_a_map_tells_its_value_and_a_click_moves_there(look: Any) -> None:
    found = example()
    seen = look(found)
    frame = seen.page.locator(".time-frame").nth(2)
    frame.scroll_into_view_if_needed()
    area = frame.bounding_box()
    at = area["x"] + area["width"] * 8.5 / TIMES, area["y"] + area["height"] * 1.5 / TIMES
    seen.page.mouse.move(*at)
    text = seen.page.locator(".tip").inner_text()
    assert f"{found.matrix()[2, 1, 8]:.4f}" in text
    assert "step 10 against step 80" in text
    seen.page.mouse.click(*at)
    assert seen.page.locator("#time-a").input_value() == "1"
    assert seen.page.locator("#time-b").input_value() == "8"


@pytest.mark.browser
def test_white_lines_begin_where_a_layer_has_settled(look: Any) -> None:
    found = example()
    seen = look(found)
    for s, site in enumerate(found.sites):
        lines = seen.page.locator(".time-map").nth(s).locator(".settled")
        ways = lines.evaluate_all("nodes => nodes.map((n) => n.getAttribute('d'))")
        at = [found.settled(t)[site] // 10 for t in (0.99, 0.999)]
        assert ways == [f"M{k} {TIMES}V{k}H{TIMES}" for k in at]
    assert seen.page.locator(".settled").first.evaluate("n => getComputedStyle(n).stroke") == "rgb(255, 255, 255)"


@pytest.mark.browser
def test_tabs_change_the_measure_and_near_stays_bright(look: Any) -> None:
    seen = look(example())
    seen.page.get_by_role("tab", name="weight_distance").click()
    assert sum(pixel(seen, 0, 0, 0)[:3]) > sum(pixel(seen, 0, 0, TIMES - 1)[:3])
    assert "a hundredth" in seen.page.locator("main").inner_text()
    seen.page.get_by_role("tab", name="weight_distance").press("ArrowRight")
    assert seen.page.locator("[aria-selected=true]").inner_text() == "atom_cosine"
    assert seen.complaints == []


@pytest.mark.browser
@pytest.mark.parametrize(
    "made", [{"sites": 1}, {"sites": 70}, {"two_runs": True}, {"sites": len(HOSTILE), "names": HOSTILE}]
)
def test_few_many_two_and_hostile(look: Any, made: dict[str, Any]) -> None:
    seen = look(example(**made), width=400)
    assert seen.complaints == []
    assert seen.requests == [seen.path.as_uri()]
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert seen.page.locator(".time-map").count() == made.get("sites", 4)
    assert seen.page.evaluate("document.querySelectorAll('main script, main img, main iframe').length") == 0
    if made.get("two_runs"):
        assert seen.page.locator(".settled").count() == 0
        assert "Step of A" in seen.page.locator("main").inner_text()


@pytest.mark.browser
def test_one_time_alone_is_no_accident(look: Any) -> None:
    one = Estimate(np.ones((2, 1, 1)), 1, "", "up", (0.0, 1.0), 1.0)
    seen = look(Dynamics("r", "r", "atoms", ("a", "b"), (5,), (5,), {"m": one}))
    assert seen.complaints == []


def test_two_sites_correlate_with_depth_whatever_they_do() -> None:
    assert "step and depth correlate" in sentence(example(3), "atom_cosine")
    assert "last" in sentence(example(2), "atom_cosine")
    assert "correlate" not in sentence(example(2), "atom_cosine")


def moving(*to_end: list[float]) -> Dynamics:
    """Sites with these similarities of each step to the last."""
    steps = tuple(range(len(to_end[0])))
    value = np.zeros((len(to_end), len(steps), len(steps)))
    value[:, :, -1] = to_end
    names = tuple(f"conv{k}" for k in range(len(to_end)))
    values = {"cka": Estimate(value, 9, "rows", "up", (0.0, 1.0), 1.0)}
    return Dynamics("run", "run", "activations", names, steps, steps, values, False, {})


def test_nothing_settles_at_the_last_step() -> None:
    text = sentence(moving([0.98, 0.9, 1.0], [0.4, 0.6, 1.0]), "cka")
    assert text.startswith("By cka, conv1 moved most (0.400 between step 0 and step 2); no site came within 0.99")
    text = sentence(moving([0.9, 0.995, 1.0], [0.4, 0.6, 1.0]), "cka")
    assert "conv1 moved most" in text
    assert (
        "was not within 0.99 of its last state before that; conv0 settled" not in text
    )  # one alone is neither first nor last
    assert "step 2)" in text
    assert "settled" not in sentence(moving([1.0, 1.0, 1.0], [0.995, 1.0, 1.0]), "cka")
    assert "nothing moved" in sentence(moving([1.0, 1.0, 1.0], [0.995, 1.0, 1.0]), "cka")


@pytest.mark.browser
def test_the_page_shows_no_step_for_what_moves_to_the_end(look: Any) -> None:
    seen = look(moving([0.98, 0.9, 1.0], [0.4, 0.6, 1.0]))
    assert seen.page.locator("table.layers").inner_text().count("later") == 4
    assert seen.page.locator(".settled-dot, .settled").count() == 0
    assert seen.page.title() == "run over time"
    assert seen.complaints == []
