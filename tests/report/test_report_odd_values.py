"""Every page, opened with values that a scale has trouble with: no error, no empty card, no label on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_examples import side, similarity, with_chance
from test_report_answers import a_map, recommendation
from test_report_leaderboard import board, entry

from sosie.report import write_report
from sosie.results import (
    TRANSFER,
    Answer,
    Caveat,
    Clusters,
    Comparison,
    Comparisons,
    Duplicates,
    Dynamics,
    Entry,
    Estimate,
    Leaderboard,
    Side,
)

pytestmark = pytest.mark.browser
Fill = Callable[[tuple[int, ...]], np.ndarray]
LONG = "encoder.layers.encoder_layer_{0}.self_attention.out_proj.activation_post_process." * 3


def _spread(*ends: float) -> Fill:
    return lambda shape: np.resize(np.array(ends), shape).astype(float)


FILLS: dict[str, Fill] = {
    "all 1": _spread(1.0),
    "all 0": _spread(0.0),
    "1 but for rounding": _spread(1.0, 1 - 2**-53, 1 - 2**-24, 1 + 2**-52),
    "0 but for rounding": _spread(0.0, 3e-17, -1e-17),
    "no value": _spread(np.nan),
    "one value": lambda shape: np.where(np.arange(np.prod(shape)) == 0, 0.25, np.nan).reshape(shape),
    "tiny": _spread(1e-300, 4e-300, 2e-301),
    "huge": _spread(1e300, -3e300, 2e299),
    "infinite": _spread(np.inf, 0.5, 0.25),
    "negative": _spread(-0.7, -0.2, -0.9999999),
    "tiny and huge": _spread(1e-300, 1e300, 0.5),
    "close together": _spread(123456.001, 123456.002, 123456.003),
}
SITES = {"one": ["conv1"], "few": ["all", *(f"layer{k}" for k in range(4))], "long": [LONG.format(k) for k in range(7)]}


def fills(sites: list[str]) -> dict[str, Fill]:
    """All of them for a few sites, some for one site and for long names."""
    return FILLS if sites is SITES["few"] else {odd: FILLS[odd] for odd in ("all 1", "no value", "negative")}


def comparison(sites: list[str], *, name: str = "b") -> Comparison:
    """A similarity that is bounded and a distance that is not, of each kind of odd values."""
    values = {}
    for odd, fill in fills(sites).items():
        value = fill((len(sites), len(sites)))
        bounded = similarity(value, doubt=False, low=value, high=value)
        values[odd] = bounded if odd in ("infinite", "huge") else with_chance(bounded, 0.5)
        values[f"{odd}, down"] = similarity(value, doubt=False, closer="down", bounds=(None, None), same=None)
    return Comparison(side("a" * 80 if len(sites) > 5 else "a", sites), side(name, sites), values)


def several(sites: list[str]) -> Comparisons:
    names = ("a", "b", "c")
    pairs = {(i, j): comparison(sites, name=names[j]) for i in range(3) for j in range(i + 1, 3)}
    return Comparisons(names, pairs)


def stitched(sites: list[str]) -> Iterator[Comparison]:
    order = (Caveat("nothing off the diagonal"),)
    for fill in fills(sites).values():
        value = np.full((len(sites), len(sites)), np.nan)
        np.fill_diagonal(value, fill((len(sites),)))
        values = {
            "relative_accuracy": similarity(
                value, doubt=False, bounds=(0.0, None), caveats=order, low=value, high=value
            ),
            "agreement_b": similarity(value, doubt=False, bounds=(0.0, 1.0), caveats=order),
            "cross_entropy": similarity(
                value, doubt=False, bounds=(0.0, None), closer="down", same=None, caveats=order
            ),
            "linear_cka": similarity(value, doubt=False, caveats=order),
        }
        yield Comparison(side("a", sites), side("b", sites), values, "positions", kind="stitching")


def transferred(sites: list[str]) -> Iterator[Comparisons]:
    for fill in fills(sites).values():
        value = fill((len(sites), 1))
        values = {
            name: similarity(value, doubt=False, closer="down", bounds=(0.0, None), same=None, low=value, high=value)
            for name in TRANSFER
        }
        data = Side("probe", ("probe",), (0,), ((),))
        names = enumerate(("one", "other"))
        pairs = {(k, 2): Comparison(side(name, sites), data, values, kind="transfer") for k, name in names}
        yield Comparisons(("one", "other", "probe"), pairs)


def dynamics(sites: list[str], *, two_runs: bool = False) -> Dynamics:
    times = 1 if len(sites) == 1 else 3
    values = {}
    for odd, fill in fills(sites).items():
        value = fill((len(sites), times, times))
        values[odd] = Estimate(value, 54, "the atoms themselves", "up", (-1.0, 1.0), 1.0)
        values[f"{odd}, down"] = Estimate(value, 54, "the weights themselves", "down", (0.0, None), 0.0)
    steps = tuple(10 * k for k in range(times))
    names = ("run", "other" if two_runs else "run")
    return Dynamics(*names, "atoms", tuple(sites), steps, steps, values, two_runs, {"sosie": "0"})


def benchmark(sites: list[str]) -> Iterator[Leaderboard]:
    for fill in fills(sites).values():
        numbers = [float(v) if np.isfinite(v) else 0.0 for v in fill((len(sites),))]
        entries = [
            entry(name, float(np.clip(v, -1, 1)), auc=float(np.clip(v, 0, 1)), moved=v)
            for name, v in zip(sites, numbers, strict=True)
        ]
        yield board(*entries, Entry("failed", "models", None, failures={"direction": "no luck"}))
    yield board(Entry("failed", "models", None, failures={"direction": "no luck"}))


def answers(sites: list[str]) -> Iterator[Answer]:
    for fill in fills(sites).values():
        known = [float(v) if np.isfinite(v) else None for v in fill((len(sites),))]
        rows = [{"name": name, "value": v, "x": v or 0.0, "y": 0.0} for name, v in zip(sites, known, strict=True)]
        rows = [{**row, "architecture": "Net", "task": None, "tags": [], "same_as": "x", "why": "near"} for row in rows]
        yield replace(a_map(), found=tuple(rows))
        yield Duplicates({"models": 9}, tuple(rows))
    yield recommendation(0, 1)
    yield Clusters({"clusters": 0, "silhouette": None, "kind": "cka"}, ())


PAGES: dict[str, Callable[[list[str]], Any]] = {
    "compare": comparison,
    "models": several,
    "outputs": lambda sites: replace(comparison(sites[:1]), rows_rule="outputs"),
    "weights": lambda sites: replace(comparison(sites), rows_rule="tensors"),
    "stitch": stitched,
    "transfer": transferred,
    "dynamics": dynamics,
    "two runs": lambda sites: dynamics(sites, two_runs=True),
    "benchmark": benchmark,
    "answers": answers,
}

# What a reader would call broken, in words; an empty list if nothing is.
BROKEN = r"""async () => {
  const broken = () => {
    const found = [];
    const said = (node) => (node.textContent ?? "").trim();
    for (const card of document.querySelectorAll("main .card, main .curve-host, main .map, main .bar-host")) {
      const titles = [...card.querySelectorAll("h3")].map(said).join("");
      const drawn = [...card.querySelectorAll("svg, canvas")].some((node) => node.childNodes.length || node.width);
      if (!drawn && said(card) === titles) found.push(`empty: ${titles || card.className}`);
    }
    if (document.querySelector("main").childElementCount === 0) found.push("empty page");
    for (const node of document.querySelectorAll("main svg *, main svg")) {
      for (const { name, value } of node.attributes) {
        const bad = name !== "class" && /NaN|Infinity|undefined/.test(value);
        if (bad) found.push(`${node.tagName} ${name}=${value.slice(0, 60)}`);
      }
    }
    const odd = document.body.innerText.match(/\bNaN\b|\bInfinity\b|\bnull\b|\[object|\d\.\d{7,}|\d{9,}/);
    if (odd) found.push(`text: ${odd[0]}`);
    if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the screen");
    for (const svg of document.querySelectorAll("main svg")) {
      const labels = [...svg.querySelectorAll("text.label:not([transform])")].filter(said)
        .map((node) => [said(node), node.getBoundingClientRect()]);
      const edge = svg.getBoundingClientRect();
      for (const [k, [text, box]] of labels.entries()) {
        if (box.left < edge.left - 2 || box.right > edge.right + 2) found.push(`cut off: ${text}`);
        for (const [other, there] of labels.slice(k + 1)) {
          const over = Math.min(box.right, there.right) - Math.max(box.left, there.left);
          const up = Math.min(box.bottom, there.bottom) - Math.max(box.top, there.top);
          if (over > 1 && up > 3) found.push(`overlap: ${text} / ${other}`);
        }
      }
    }
    return found;
  };
  const all = {};
  const click = (node) => {
    node?.click();
    return node;
  };
  for (let k = 0; k === 0 || k < document.querySelectorAll("[role=tab]").length; k += 1) {
    const tab = click(document.querySelectorAll("[role=tab]")[k]);
    for (const choice of ["drawn-value", "stretch", "drawn-score"]) {
      if (!click(document.getElementById(choice)) && choice !== "drawn-value") continue;
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      for (const fault of broken()) all[fault] ??= `${tab?.textContent ?? ""} ${choice}`;
    }
  }
  return Object.entries(all).slice(0, 9);
}"""


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Any]:
    context = chromium.new_context(viewport={"width": 1100, "height": 900})
    opened = context.new_page()
    opened.complaints = []
    opened.on("console", lambda message: opened.complaints.append(message.text))
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    yield opened
    context.close()


@pytest.mark.parametrize("kind", PAGES)
def test_pages_of_odd_values_are_whole(page: Any, tmp_path: Path, kind: str) -> None:
    found = {}
    for count, sites in SITES.items():
        made = PAGES[kind](sites)
        for k, result in enumerate(made if isinstance(made, Iterator) else [made]):
            page.goto(write_report(result, tmp_path / "page.html").as_uri())
            faults = page.evaluate(BROKEN) + page.complaints
            if faults:
                found[f"{count} {k}"] = faults
            page.complaints.clear()
    assert found == {}
