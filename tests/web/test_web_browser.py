"""The explorer in a real browser: what a reader sees, picks, sends; on small screens, with hostile names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np
import pytest
from web_examples import HOSTILE, HOSTILE_SITE, INPUTS, ODD_VALUES, SIZE, an_odd_run, made

from sosie.zoo import Zoo

pytestmark = pytest.mark.browser
Look = Callable[..., Any]
VIEWS = [
    "#/", "#/models", "#/model/1", "#/pair/1/5", "#/clusters", "#/clusters?k=3&cluster=0", "#/duplicates?threshold=0.9",
    "#/runs", "#/runs?name=first", "#/upload",
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_view_opens_and_fits(look: Look, address: str, view: str, width: int, scheme: str) -> None:
    page = look(view, width, color_scheme=scheme)
    assert page.locator("h1").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.complaints == []
    assert all(url.startswith(address) for url in page.asked)


# What a reader would call broken; an empty list if nothing is.
BROKEN = r"""() => {
  const found = [];
  const said = (node) => (node.textContent ?? "").trim();
  for (const card of document.querySelectorAll("main .card")) {
    const drawn = card.querySelector("canvas, svg > *");
    if (!drawn && said(card) === [...card.querySelectorAll("h2")].map(said).join("")) found.push("empty card");
  }
  for (const node of document.querySelectorAll("main svg *, main svg")) {
    for (const { name, value } of node.attributes) {
      const bad = name !== "class" && /NaN|Infinity|undefined/.test(value);
      if (bad) found.push(`${name}=${value.slice(0, 60)}`);
    }
  }
  const odd = document.body.innerText.match(/\bNaN\b|\bInfinity\b|\bnull\b|\[object|\d\.\d{7,}/);
  return odd ? [...found, odd[0]] : found;
}"""


@pytest.mark.parametrize("models", [0, 1, 3])
def test_a_zoo_of_few_or_equal_models_and_odd_runs_is_shown(
    look: Look, serve: Callable[[Zoo], str], tmp_path: Path, models: int
) -> None:
    zoo = Zoo(tmp_path / "zoo", INPUTS, size=SIZE)
    for k in range(models):
        zoo.add(made(0, sites=1), f"twin{k}")
    (zoo.folder / "runs").mkdir()
    an_odd_run(*((1, 1) if models == 1 else (3, 4))).save(zoo.folder / "runs" / "odd.json")
    of_models = ["#/model/1", "#/pair/1/1", "#/pair/1/1?kind=weights"] if models else []
    odd = [name + way for name in ODD_VALUES for way in ("", ", down")] if models else []
    views = [view for view in VIEWS if "/model/" not in view and "/pair/" not in view and "name=" not in view]
    page, at = look("#/", at=(address := serve(zoo))), {}
    for view in [*views, *of_models, *(f"#/runs?name=odd&measure={name}" for name in odd)]:
        page.goto(address + view)
        page.wait_for_selector("main:not([aria-busy])")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        # An answer that the zoo is too small for this is told in words; the browser notes its status.
        said = [text for text in page.complaints if not text.startswith("Failed to load resource")]
        if faults := page.evaluate(BROKEN) + said:
            at[view] = faults
        page.complaints.clear()
    assert at == {}
    if models == 3:
        page.goto(address)
        page.wait_for_selector("canvas.points")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert 5 < max(reach_of_points(page)) < 60, "models that are equal but for rounding lie at one place"


def reach_of_points(page: Any) -> list[float]:
    """How wide and how high the points of the map reach together, in CSS pixels."""
    return page.evaluate("""() => {
      const canvas = document.querySelector("canvas.points");
      const { width, height } = canvas;
      const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
      const isBlue = (k) => data[4 * k + 3] > 200 && data[4 * k + 2] > data[4 * k] + 60;
      const blue = [...Array(width * height).keys()].filter(isBlue);
      const reach = (of) => Math.max(...blue.map(of)) - Math.min(...blue.map(of));
      return [reach((k) => k % width), reach((k) => Math.floor(k / width))].map((length) => length / devicePixelRatio);
    }""")


def points_of(page: Any) -> Any:
    """Every model's place on the canvas, as the map draws them: fitted, the vertical axis upwards."""
    answer = page.evaluate("fetch('api/map').then((a) => a.json())")
    box = page.locator("canvas.points").bounding_box()
    at = np.array([[p["x"], p["y"]] for p in answer["points"]])
    low, high = at.min(0), at.max(0)
    scale = min((np.array([box["width"], box["height"]]) - 72) / (high - low))
    middle = np.array([box["x"] + box["width"] / 2, box["y"] + box["height"] / 2])
    places = middle + scale * (at - (low + high) / 2) * np.array([1, -1])
    return {p["name"]: tuple(place) for p, place in zip(answer["points"], places, strict=True)}


def test_the_map_tells_a_model_and_opens_it(look: Look) -> None:
    page = look("#/")
    places = points_of(page)
    for name in ("m4", "base"):
        page.mouse.move(*places[name])
        assert page.locator(".tip").inner_text().split("\n")[0] == name
    page.mouse.click(*places["base"])
    page.wait_for_function("() => location.hash.startsWith('#/model/')")
    page.wait_for_selector("h1:has-text('base')")
    assert page.complaints == []


def test_the_map_zooms_moves_and_comes_back(look: Look) -> None:
    page = look("#/")
    before = points_of(page)["m4"]
    said = lambda: page.locator(".tip").inner_text() if page.locator(".tip").is_visible() else ""  # noqa: E731
    page.mouse.move(before[0], before[1])
    page.mouse.down()
    page.mouse.move(before[0] + 60, before[1] + 40, steps=4)
    page.mouse.up()
    page.mouse.move(before[0] + 59, before[1] + 40)
    assert said().startswith("m4")
    page.get_by_role("button", name="Zoom in").click()
    page.mouse.move(before[0] + 60, before[1] + 41)
    page.get_by_role("button", name="Show all").click()
    page.mouse.move(before[0], before[1] + 1)
    assert said().startswith("m4")
    assert page.url.endswith("#/")


def test_the_map_can_be_walked_with_keys(look: Look) -> None:
    page = look("#/")
    page.locator("canvas.points").focus()
    page.keyboard.press("ArrowRight")
    first = page.locator("#announcer").inner_text()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#announcer").inner_text() != first
    name = page.locator("#announcer").inner_text().rsplit(", ", 1)[0]
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash.startsWith('#/model/')")
    page.wait_for_function("name => document.querySelector('h1')?.innerText === name", arg=name)


def test_groups_have_colours_and_can_be_picked(look: Look) -> None:
    page = look("#/")
    assert page.locator(".legend").inner_text().split() == ["Net", "4", "Wide0", "4", "Wide1", "3", "<b>Odd</b>", "1"]
    page.get_by_role("button", name="Wide1").click()
    assert page.get_by_role("button", name="Wide1").get_attribute("aria-pressed") == "true"
    page.mouse.move(*points_of(page)["base"])
    assert not page.locator(".tip").is_visible() or "base" not in page.locator(".tip").inner_text()
    page.get_by_label("Colour").select_option("base")
    assert (
        page.locator(".legend").inner_text().split("\n")[:2] == ["base", "4"]
        or "base" in page.locator(".legend").inner_text()
    )


def test_the_finder_finds_by_a_part_of_a_name(look: Look) -> None:
    page = look("#/models")
    box = page.get_by_role("combobox", name="Find a model")
    box.fill("SE-2")
    page.wait_for_function("() => document.querySelectorAll('#finder .found [role=option]').length === 1")
    assert page.locator("#finder .found [role=option] bdi").inner_text() == "base-2"
    box.press("Enter")
    page.wait_for_selector("h1:has-text('base-2')")
    box.fill("m9")
    box.press("Enter")  # before the server has answered
    page.wait_for_selector("h1:has-text('m9')")
    box.fill("nothing like that")
    page.wait_for_selector(".found:has-text('no model of that name')")
    box.press("Escape")
    assert not page.locator("#finder .found").is_visible()


def test_models_are_filtered_in_the_address(look: Look) -> None:
    page = look("#/models")
    assert page.locator("table.models tbody tr").count() == 12
    page.get_by_label("Tag").select_option("tuned")
    page.wait_for_function("() => location.hash.includes('tag=tuned')")
    page.wait_for_function("() => document.querySelectorAll('table.models tbody tr').length === 3")
    assert "3 of 12 models" in page.locator(".lead").inner_text()
    page.go_back()
    page.wait_for_function("() => document.querySelectorAll('table.models tbody tr').length === 12")


def test_a_model_shows_its_nearest_and_leads_to_the_comparison(look: Look) -> None:
    page = look("#/model/1")
    names = page.locator("table.nearest").first.locator("tbody td:nth-child(2)").all_inner_texts()
    assert names[:3] == ["base-1", "base-2", "base-3"]
    page.get_by_label("Of its layer").select_option("layer3")
    page.wait_for_function("() => document.querySelector('.answer tbody td:nth-child(3)')?.textContent === 'layer3'")
    page.get_by_role("link", name="compare").first.click()
    page.wait_for_selector("svg.heatmap")
    assert page.locator("h1").inner_text() == "base and base-1"
    assert page.complaints == []


def test_the_heat_map_tells_the_value_of_the_cell_under_the_labels(look: Look) -> None:
    page = look("#/pair/1/2")
    page.wait_for_selector("svg.heatmap")
    told = page.evaluate("fetch('api/pairs/1/2?exact=true').then((a) => a.json())")["value"]
    for i, j in [(0, 0), (1, 3), (3, 0), (2, 2)]:
        row = page.locator(f"svg [data-row='{i}']").bounding_box()
        column = page.locator(f"svg [data-column='{j}']").bounding_box()
        page.mouse.move(column["x"] + column["width"] / 2, row["y"] + row["height"] / 2)
        text = page.locator(".tip").inner_text()
        assert float(text.split("\n")[0]) == pytest.approx(told[i][j], abs=6e-4)
        assert text.index(f"layer{i}") <= text.rindex(f"layer{j}")
    page.locator("svg.heatmap").focus()
    page.keyboard.press("ArrowDown")
    assert re.match(r"layer\d and layer\d: -?\d", page.locator("#announcer").inner_text())
    page.get_by_role("link", name="swap").click()
    page.wait_for_selector("h1:has-text('base-1 and base')")
    assert page.complaints == []


@pytest.mark.parametrize(
    ("view", "heads", "drawn"),
    [("#/", "name,x,y", "path"), ("#/pair/1/5", "row,column,value", "rect"), ("#/runs?name=first", "row,", "path")],
)
def test_figures_are_saved(look: Look, view: str, heads: str, drawn: str) -> None:
    page = look(view)
    saved = {}
    for kind in ("CSV", "SVG", "PNG"):
        with page.expect_download() as found:
            page.get_by_title(f"Download {kind}").click()
        assert found.value.suggested_filename.endswith(f".{kind.lower()}")
        saved[kind] = Path(found.value.path()).read_bytes()
    assert saved["CSV"].decode().startswith(heads)
    assert len(saved["CSV"].decode().strip().split("\r\n")) > 5
    svg = ElementTree.fromstring(saved["SVG"])
    assert len([node for node in svg.iter() if node.tag.endswith(drawn)]) > 2
    assert [node for node in svg.iter() if node.tag.endswith("text") and node.text]
    assert saved["PNG"].startswith(b"\x89PNG")
    assert len(saved["PNG"]) > 5_000
    assert page.complaints == []


def test_a_run_is_moved_through_by_the_slider(look: Look) -> None:
    page = look("#/runs?name=first")
    first_row = lambda: page.locator("svg .numbers text").all_text_contents()[10:15]  # noqa: E731  of the third layer
    assert first_row() == ["0.00", "0.50", "0.80", "0.95", "1.00"]
    slider = page.get_by_label("Step", exact=True)
    slider.focus()
    slider.press("Home")
    assert page.locator(".step").inner_text() == "step 0"
    assert first_row() == ["1.00", "0.50", "0.20", "0.05", "0.00"]
    page.get_by_role("link", name="procrustes_angle").click()
    page.wait_for_selector(".tab.current:has-text('procrustes_angle')")
    assert page.complaints == []


def test_a_fingerprint_is_looked_up(look: Look, tmp_path: Path) -> None:
    page = look("#/upload")
    page.set_input_files("#file", made(0, architecture="<b>Sent</b>").save(tmp_path / "mine.safetensors"))
    page.wait_for_selector("table.nearest")
    assert page.locator("table.nearest tbody td:nth-child(2)").first.inner_text() == "base"
    assert "<b>Sent</b>, 4 layers" in page.locator("main").inner_text()
    page.wait_for_selector(".small-map canvas.points")
    assert "distances to 12 models" in page.locator(".small-map").inner_text()
    (tmp_path / "wrong.safetensors").write_bytes(b"no fingerprint")
    page.set_input_files("#file", tmp_path / "wrong.safetensors")
    page.wait_for_selector(".wrong")
    assert "safetensors" in page.locator(".wrong").inner_text()
    (tmp_path / "large.safetensors").write_bytes(bytes(5 * 2**20))
    asked = len(page.asked)
    page.set_input_files("#file", tmp_path / "large.safetensors")
    page.wait_for_selector(".wrong:has-text('at most')")
    assert len(page.asked) == asked  # too large a file is not even sent
    assert [text for text in page.complaints if "422" not in text] == []


@pytest.mark.parametrize(
    "view", ["#/", "#/models", "#/model/12", "#/pair/12/1", "#/pair/1/12", "#/clusters?k=12&cluster=8", "#/duplicates"]
)
def test_hostile_names_are_shown_and_do_nothing(look: Look, address: str, view: str) -> None:
    page = look(view, 390)
    page.get_by_role("combobox", name="Find a model").fill("<img")
    page.wait_for_function("() => document.querySelectorAll('#finder .found bdi').length === 1")
    assert page.locator("#finder .found bdi").inner_text() == HOSTILE
    if view.startswith(("#/model/", "#/pair/")):
        page.wait_for_selector("table")
        assert HOSTILE in page.locator("h1").inner_text()
    assert page.locator("main img, main script, main b, main i, main u").count() == 0
    assert page.complaints == []
    assert all(url.startswith(address) for url in page.asked)


def test_a_site_with_controls_in_its_name_is_spelt_out(look: Look) -> None:
    page = look("#/pair/12/1")
    page.wait_for_selector("table")
    assert HOSTILE_SITE[:-1] + "<U+202E>" in page.locator("table").first.inner_text()
    assert "\u202e" not in page.locator("main").inner_text()


def test_clusters_are_shown_and_picked_in_place(look: Look) -> None:
    page = look("#/clusters?k=3")
    told = page.evaluate("fetch('api/clusters?k=3').then((a) => a.json())")
    names = page.locator("table.clusters .picked-group").all_inner_texts()
    assert names == [group["centre"]["name"] for group in told["groups"]]
    assert page.locator("table.clusters td:nth-child(2)").all_inner_texts() == [str(g["count"]) for g in told["groups"]]
    page.locator("table.clusters .picked-group").first.click()
    page.wait_for_selector("table.members")
    members = page.evaluate("fetch('api/clusters/0?k=3').then((a) => a.json())")["rows"]
    assert page.locator("table.members td:first-child").all_inner_texts() == [row["name"] for row in members]
    assert page.url.endswith("cluster=0")
    points = points_of(page)  # those of the group can be pointed at; picked again, all are there
    page.mouse.move(*points[members[0]["name"]])
    assert page.locator(".tip").is_visible()
    page.locator("table.clusters .picked-group").first.click()
    page.wait_for_selector("table.members", state="detached")
    page.get_by_label("Groups").select_option("2")
    page.wait_for_function("() => document.querySelectorAll('table.clusters .picked-group').length === 2")
    assert page.complaints == []


def test_the_map_is_coloured_as_the_clusters_are(look: Look) -> None:
    page = look("#/?by=cluster")
    on_map = {
        text.split("\n")[0]: classes
        for text, classes in page.locator(".legend .group").evaluate_all(
            "all => all.map((one) => [one.childNodes[1].textContent, one.querySelector('.swatch').className])"
        )
    }
    page = look("#/clusters")
    listed = page.locator("table.clusters .picked-group").evaluate_all(
        "all => all.map((one) => [one.querySelector('bdi').textContent, one.querySelector('.swatch').className])"
    )
    assert dict(listed) == {name: on_map[name] for name, _ in listed}
    assert len(listed) >= 2


def test_clusters_that_cannot_be_made_leave_the_choices(look: Look) -> None:
    page = look("#/clusters?k=3&tag=tuned&architecture=Wide0")  # nobody is both
    assert page.locator(".wrong").inner_text()
    assert page.get_by_label("Tag").is_visible()


def test_duplicates_are_shown_by_reason(look: Look) -> None:
    page = look("#/duplicates")
    assert "None of 12 models is there twice." in page.locator(".lead").inner_text()
    page.get_by_label("Alike from").select_option("0.9")
    page.wait_for_selector("table.duplicates")
    told = page.evaluate("fetch('api/duplicates?threshold=0.9').then((a) => a.json())")["rows"]
    assert told[0]["name"] == "base-1"
    assert page.locator("table.duplicates td:nth-child(1)").all_inner_texts() == [row["name"] for row in told]
    assert page.locator("table.duplicates td:nth-child(2)").all_inner_texts() == [row["same_as"] for row in told]
    assert float(page.locator("table.duplicates td:nth-child(3)").first.inner_text()) == pytest.approx(
        told[0]["value"], abs=6e-6
    )
    page.get_by_role("link", name="compare").first.click()
    page.wait_for_selector("h1:has-text('base and base-1')")
    assert page.complaints == []


def test_a_model_tells_where_it_comes_from(look: Look) -> None:
    page = look("#/model/3")
    page.wait_for_selector("table.family")
    told = page.evaluate("fetch('api/models/3/family').then((a) => a.json())")["rows"]
    rows = page.locator("table.family tbody tr")
    assert [rows.nth(k).locator("td").first.inner_text() for k in range(rows.count())] == [row["name"] for row in told]
    words = page.locator(".family-found").inner_text()
    assert "recorded as its parent: base" in words.lower()
    parent = next(k for k, row in enumerate(told) if row["name"] == "base")
    assert rows.nth(parent).locator("td").nth(1).inner_text() == "parent"
    assert float(rows.nth(parent).locator("td").nth(2).inner_text()) == pytest.approx(told[parent]["score"], abs=6e-4)


def test_what_needs_data_is_named_where_it_is_looked_for(look: Look) -> None:
    page = look("#/models")
    assert "sosie zoo recommend zoo --data" in page.locator("main").inner_text()


@pytest.mark.parametrize("view", ["#/model/999", "#/nothing", "#/pair/1/x", "#/runs?name=..%2Fzoo"])
def test_what_is_not_there_is_told(look: Look, view: str) -> None:
    page = look(view)
    assert page.locator("h2").first.inner_text() == "That did not work"
    assert page.locator(".wrong").inner_text()
    page.get_by_role("link", name="Back to the map").click()
    page.wait_for_selector("canvas.points")


def test_a_name_in_the_address_works_like_a_number(look: Look) -> None:
    page = look("#/model/base-1")
    assert page.locator("h1").inner_text() == "base-1"
    for view in ("#/pair/base/base-2", "#/pair/base/2"):
        page = look(view)
        assert page.locator("h1").inner_text().startswith("base and base-")
        assert page.complaints == []
    quoted = quote(HOSTILE, safe="")
    assert look(f"#/model/{quoted}").locator("h1").inner_text() == HOSTILE
    page = look("#/model/basse-1")
    assert "base-1" in page.locator("main").inner_text(), "the nearest name is said"
