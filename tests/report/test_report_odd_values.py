"""Every page, opened with values that a scale has trouble with: no error, no empty card, no label on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_examples import side, similarity, with_chance
from test_report_answers import a_map, neighbours, recommendation
from test_report_leaderboard import board, correlations, entry

from sosie.report import write_report
from sosie.results import TRANSFER, Caveat, Clusters, Comparison, Comparisons, Duplicates, Dynamics, Entry, Side, Values

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
    "all undefined": _spread(np.nan),
    "one defined": lambda shape: np.where(np.arange(np.prod(shape)) == 0, 0.25, np.nan).reshape(shape),
    "tiny": _spread(1e-300, 4e-300, 2e-301),
    "huge": _spread(1e300, -3e300, 2e299),
    "infinite": _spread(np.inf, -np.inf, 0.5),
    "negative": _spread(-0.7, -0.2, -0.9999999),
    "tiny and huge": _spread(1e-300, 1e300, 0.5),
    "close together": _spread(123456.001, 123456.002, 123456.003),
}
SITES = {"one": ["conv1"], "few": [f"layer{k}" for k in range(5)], "long": [LONG.format(k) for k in range(7)]}


def comparison(fill: Fill, sites: list[str], *, closer: str = "up", name: str = "b") -> Comparison:
    value = fill((len(sites), len(sites)))
    bounded = similarity(value, low=value, high=value, closer=closer)
    unbounded = similarity(value, doubt=False, closer="down", bounds=(None, None), same=None)
    with np.errstate(all="ignore"):
        values = {"bounded": with_chance(bounded, 0.5), "unbounded": unbounded}
    return Comparison(side("a" * 80 if len(sites) > 5 else "a", sites), side(name, sites), values)


def several(fill: Fill, sites: list[str]) -> Comparisons:
    names = ("a", "b", "c")
    pairs = {(i, j): comparison(fill, sites, name=names[j]) for i in range(3) for j in range(i + 1, 3)}
    return Comparisons(names, pairs)


def outputs(fill: Fill, sites: list[str]) -> Comparison:
    found = comparison(fill, ["output"])
    return replace(found, rows_rule="outputs")


def stitched(fill: Fill, sites: list[str]) -> Comparison:
    value = np.full((len(sites), len(sites)), np.nan)
    np.fill_diagonal(value, fill((len(sites),)))
    order = (Caveat("nothing off the diagonal"),)
    values = {
        name: similarity(value, bounds=bounds, caveats=order, closer=closer)
        for name, bounds, closer in [
            ("relative_accuracy", (0.0, None), "up"), ("agreement_b", (0.0, 1.0), "up"),
            ("cross_entropy", (0.0, None), "down"), ("linear_cka", (0.0, 1.0), "up"),
        ]
    }  # fmt: skip
    return Comparison(side("a", sites), side("b", sites), values, "positions")


def transferred(fill: Fill, sites: list[str]) -> Comparisons:
    def scored(name: str) -> Comparison:
        value = fill((len(sites), 1))
        values = {score: similarity(value, closer="down", bounds=(0.0, None), same=None) for score in TRANSFER}
        return Comparison(side(name, sites), Side("probe", ("probe",), (0,), ((),)), values)

    return Comparisons(("one", "other", "probe"), {(0, 2): scored("one"), (1, 2): scored("other")})


def weights(fill: Fill, sites: list[str]) -> Comparison:
    found = comparison(fill, ["all", *sites])
    return replace(found, rows_rule="tensors")


def dynamics(fill: Fill, sites: list[str], *, two_runs: bool = False) -> Dynamics:
    times = 1 if len(sites) == 1 else 3
    value = fill((len(sites), times, times))
    values = {
        "atom_cosine": Values(value, 54, "the atoms themselves", "up", (-1.0, 1.0), 1.0),
        "weight_distance": Values(value, 54, "the weights themselves", "down", (0.0, None), 0.0),
    }
    steps = tuple(10 * k for k in range(times))
    names = ("run", "other" if two_runs else "run")
    return Dynamics(*names, "atoms", tuple(sites), steps, steps, values, two_runs, {"sosie": "0"})


def benchmark(fill: Fill, sites: list[str]) -> Any:
    entries = []
    for name, value in zip(sites, fill((len(sites),)), strict=True):
        number = float(np.clip(value, -1, 1)) if np.isfinite(value) else 0.0
        made = entry(name, number, auc=abs(number), moved=float(value) if np.isfinite(value) else 0.0)
        groups = {"all": correlations(number), "clean": correlations(number)}
        entries.append(replace(made, grounding={kind: {**g, "groups": groups} for kind, g in made.grounding.items()}))
    return board(*entries, Entry("failed", "models", None, failures={"direction": "no luck"}))


def answers(fill: Fill, sites: list[str]) -> list[Any]:
    values = [float(v) if np.isfinite(v) else None for v in fill((len(sites),))]
    rows = tuple({"name": name, "value": v, "x": v or 0.0, "y": 0.0, "architecture": "Net", "task": None, "tags": [],
                  "cluster": 0, "centre": True, "similarity": v, "same_as": "x", "why": "near"}
                 for name, v in zip(sites, values, strict=True))  # fmt: skip
    return [
        replace(a_map(), found=rows),
        replace(neighbours(), found=rows),
        Clusters({"clusters": 1, "silhouette": None, "kind": "cka"}, rows),
        Duplicates({"models": 9}, rows),
        recommendation(2, 1),
        recommendation(0, 1),
    ]


PAGES: dict[str, Callable[[Fill, list[str]], Any]] = {
    "compare": comparison,
    "several": several,
    "outputs": outputs,
    "stitch": stitched,
    "transfer": transferred,
    "weights": weights,
    "dynamics": dynamics,
    "two runs": lambda fill, sites: dynamics(fill, sites, two_runs=True),
    "benchmark": benchmark,
    "answers": answers,
}

# What a reader would call broken, in words; an empty list if nothing is.
BROKEN = r"""() => {
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
      if (/NaN|Infinity|undefined/.test(value) && name !== "class") found.push(`${node.tagName} ${name}=${value.slice(0, 60)}`);
    }
  }
  const odd = document.body.innerText.match(/\bNaN\b|\bInfinity\b|\bnull\b|\[object|\d\.\d{7,}/);
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
  return [...new Set(found)].slice(0, 8);
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


def faults(page: Any) -> list[str]:
    """On every tab of an open page, as drawn at first and otherwise."""
    found = []
    for k in range(max(page.locator("[role=tab]").count(), 1)):
        if k:
            page.evaluate("(k) => document.querySelectorAll('[role=tab]')[k].click()", k)
        for other in (None, "#stretch", "#drawn-score"):
            if other is None or page.evaluate("(at) => { const e = document.querySelector(at); e?.click(); return !!e }", other):
                page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                found += page.evaluate(BROKEN)
    said, page.complaints = page.complaints[:], []
    return list(dict.fromkeys([*said, *found]))


@pytest.mark.parametrize("kind", PAGES)
def test_pages_of_odd_values_are_whole(page: Any, tmp_path: Path, kind: str) -> None:
    broken = {}
    cases = [(value, "few") for value in FILLS] + [("all 1", "one"), ("all undefined", "one"), ("negative", "long")]
    for value, sites in cases:
        made = PAGES[kind](FILLS[value], SITES[sites])
        for k, result in enumerate(made if isinstance(made, list) else [made]):
            path = write_report(result, tmp_path / f"{value} {sites} {k}.html")
            page.goto(path.as_uri())
            if found := faults(page):
                broken[path.stem] = found
    assert broken == {}
