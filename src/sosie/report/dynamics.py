"""Dynamics: a table on the terminal, and a page with a slider."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from ..results import THRESHOLDS, Dynamics
from .colour import data_scale, full_scale, ramp
from .page import packed, render_page
from .text import NARROWEST, _bullets, _number, _shown, print_columns, print_note, safe_text
from .words import direction, extent, flat, in_a_sentence, note_on_weights, shorten, visible

_SCRIPTS = (
    "dom",
    "labels",
    "scale",
    "tip",
    "chance",
    "scroll",
    "table",
    "dynamics_curves",
    "dynamics_maps",
    "dynamics_page",
)
BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", ".:-=+*%#"
SPARK = 24  # letters that a small curve takes, at most
CURVE = "to the end"
RULES = {
    "up": "Settled: the first step from which the similarity to the last state stays at or above the threshold.",
    "down": "Settled: the first step from which the distance to the last state stays at or below what the threshold "
    "leaves of the distance between the first state and the last (0.99: a hundredth).",
}


def print_dynamics(dynamics: Dynamics, console: Console | None = None, *, full: bool = False) -> None:
    """A sentence and a table for each measure: when each site settles, and how alike each time is to the last."""
    console = console or Console()
    for k, measure in enumerate(dynamics.values):
        if k:
            console.print()
        console.print(safe_text(console, sentence(dynamics, measure), "bold"))
        _print_table(dynamics, measure, console, full)
        if not dynamics.two_runs:
            console.print(safe_text(console, RULES[dynamics[measure].closer], "dim"))
        _bullets(console, [text for text, _ in _caveats(dynamics, measure)], "yellow")
    print_note(console, note_on_weights(dynamics.provenance))


def _print_table(dynamics: Dynamics, measure: str, console: Console, full: bool) -> None:
    ends = dynamics.to_end(measure)
    heads = ["first", "last"] if dynamics.two_runs else ["first", *(f"{t:g}" for t in THRESHOLDS)]
    if dynamics.two_runs:
        columns = [[_number(v) for v in ends[:, k]] for k in (0, -1)]
    else:
        settled = [dynamics.settled(t, measure).values() for t in THRESHOLDS]
        columns = [[_number(v) for v in ends[:, 0]], *(["never" if s is None else str(s) for s in c] for c in settled)]
    taken = sum(max(len(h), *map(len, c)) + 2 for h, c in zip(heads, columns, strict=True))
    least = min(NARROWEST, max(len(visible(site)) for site in dynamics.sites))
    small = max(min(SPARK, ends.shape[1], console.width - taken - least - 4), len(CURVE))
    room = max(console.width - taken - small - 4, NARROWEST)
    bars = BARS if (console.encoding or "utf-8").startswith("utf") else PLAIN_BARS
    low, high = _ends(ends, dynamics[measure].closer)
    shown = _shown(len(dynamics.sites), full)
    rows: list[list[str | Text]] = []
    for s in shown:
        if s is None:
            rows.append([f"… {len(dynamics.sites) - len(shown) + 1} more"])
            continue
        name = safe_text(console, shorten(visible(dynamics.sites[s]), room))
        rows.append([name, *(column[s] for column in columns), sparkline(ends[s], low, high, bars, small)])
    print_columns(console, ["site", *heads, CURVE], rows, left=(0, len(heads) + 1))


def _ends(ends: np.ndarray, closer: str) -> tuple[float, float]:
    """The least and the most alike value of a table, so that small curves can be held against each other."""
    known = ends[np.isfinite(ends)]
    if not known.size:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    return (low, high) if closer == "up" else (high, low)


def sparkline(values: np.ndarray, far: float, near: float, bars: str = BARS, most: int = SPARK) -> str:
    """One letter per time, higher being nearer; at most so many of them, at even distances."""
    picked = values[np.unique(np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int))]
    if math.isclose(far, near, rel_tol=1e-5):  # apart by rounding alone
        return "".join(bars[-1] if np.isfinite(v) else " " for v in picked)
    heights = (picked - far) / (near - far)
    return "".join(bars[round(float(h) * (len(bars) - 1))] if np.isfinite(h) else " " for h in heights)


def sentence(dynamics: Dynamics, measure: str) -> str:
    """What was found, in one sentence."""
    name = visible(measure)
    ends = dynamics.to_end(measure)
    if dynamics.two_runs:
        last = ends[:, -1]
        if np.isnan(last).all():
            return f"{name} of the last states is undefined at every site."
        key = last if dynamics[measure].closer == "up" else -last
        near, far = int(np.nanargmax(key)), int(np.nanargmin(key))
        text = f"At the end {in_a_sentence(dynamics.name_a)} and {in_a_sentence(dynamics.name_b)} are most alike at "
        text += f"{in_a_sentence(dynamics.sites[near])} ({_number(last[near])})"
        return f"{text}, by {name}." if near == far else (
            f"{text} and least at {in_a_sentence(dynamics.sites[far])} ({_number(last[far])}), by {name}."
        )  # fmt: skip
    order = dynamics.order(measure=measure)
    known = [(site, step) for site, step in zip(order.sites, order.steps, strict=True) if step is not None]
    if not known:
        return f"By {name}, no site settles: the last state is undefined."
    (first, start), (last_site, end) = known[0], known[-1]
    if start == end:
        return f"By {name}, all sites have settled (0.99 of the last state) from step {start} on."
    text = f"By {name}, {in_a_sentence(first)} settles first (0.99 of its last state from step {start} on) and "
    text += f"{in_a_sentence(last_site)} last (step {end})"
    if order.correlation is None or len(known) < 3:  # of two it is always 1 or -1
        return f"{text}."
    way = "bottom-up" if order.correlation > 0 else "top-down" if order.correlation < 0 else "neither way"
    return f"{text}; step and depth correlate by {order.correlation:+.2f} over {len(known)} sites ({way})."


def _caveats(dynamics: Dynamics, measure: str) -> list[tuple[str, str]]:
    """Each text once, with the sites that it concerns."""
    grouped: dict[str, list[str]] = {}
    for caveat in dynamics[measure].caveats:
        grouped.setdefault(visible(caveat.text), []).extend([caveat.site_a] if caveat.site_a is not None else [])
    texts = []
    for text, sites in grouped.items():
        unique = list(dict.fromkeys(map(visible, sites)))
        reach = "concerns all sites" if not unique or len(unique) == len(dynamics.sites) else _listed(unique)
        texts.append((f"{text} ({reach})", reach))
    return texts


def _listed(sites: list[str]) -> str:
    more = f" and {len(sites) - 4} more" if len(sites) > 4 else ""
    return ", ".join(shorten(site, 40) for site in sites[:4]) + more


def render_dynamics(dynamics: Dynamics) -> str:
    """The page: one file that loads nothing."""
    lines = [sentence(dynamics, measure) for measure in dynamics.values]
    names = [in_a_sentence(dynamics.name_a)] + ([in_a_sentence(dynamics.name_b)] if dynamics.two_runs else [])
    return render_page(
        title=" and ".join(names),
        question="How do they change alike?" if dynamics.two_runs else "Which layer settles when?",
        lead=lines[0] if lines else "Nothing was measured.",
        others=lines[1:],
        kind="measures",
        data=_contents(dynamics),
        scripts=_SCRIPTS,
        styles=("figures", "dynamics", "page"),
        note=note_on_weights(dynamics.provenance),
    )


def _contents(dynamics: Dynamics) -> dict[str, Any]:
    return {
        "ramp": list(ramp()),
        "twoRuns": dynamics.two_runs,
        "byDepth": dynamics.by_depth,
        "what": visible(dynamics.what),
        "names": [visible(dynamics.name_a), visible(dynamics.name_b)],
        "sites": [visible(site) for site in dynamics.sites],
        "stepsA": list(dynamics.steps_a),
        "stepsB": list(dynamics.steps_b),
        "thresholds": [] if dynamics.two_runs else list(THRESHOLDS),
        "measures": [_measure(dynamics, name) for name in dynamics.values],
        "provenance": [list(line) for line in flat(dynamics.provenance)],
    }


def _measure(dynamics: Dynamics, name: str) -> dict[str, Any]:
    values = dynamics[name]
    full, data = full_scale(values), data_scale(values)
    ends = data_scale(replace(values, value=dynamics.to_end(name)))
    place = {step: k for k, step in enumerate(dynamics.steps_a)}
    settled = [] if dynamics.two_runs else [dynamics.settled(t, name).values() for t in THRESHOLDS]
    return {
        "name": visible(name),
        "sentence": sentence(dynamics, name),
        "value": packed(values.value),
        "n": values.n,
        "statistic": visible(values.statistic),
        "closer": values.closer,
        "direction": direction(values.closer),
        "rule": "" if dynamics.two_runs else RULES[values.closer].removeprefix("Settled: "),
        "extent": extent(values.bounds),
        "same": values.same,
        "full": [full.far, full.alike],
        "clipped": full.clipped,
        "data": [data.far, data.alike],
        "ends": [ends.far, ends.alike],
        "settled": [[None if step is None else place[step] for step in steps] for steps in settled],
        "caveats": [text for text, _ in _caveats(dynamics, name)],
    }
