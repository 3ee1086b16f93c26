"""Dynamics on the terminal and as a page with a slider."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from ..results import THRESHOLDS, Dynamics, number
from .colour import RAMP, data_scale
from .page import packed, reading, render_page
from .terminal import print_bullets, print_columns, print_text, shown_rows, with_gaps
from .words import extent, flat, in_a_sentence, listed, note_on_weights, visible

_SCRIPTS = ("scale", "chance", "table", "dynamics_curves", "dynamics_maps", "dynamics_page")
BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", ".:-=+*%#"
SPARK = 24  # most letters of a small curve
CURVE = "to the end"
SETTLED = {
    "up": "Settled: the first step from which the similarity to the last state stays at or above the threshold; "
    "later: not before the last step, where every state is near itself.",
    "down": "Settled: the first step from which the distance to the last state stays at or below the share of the "
    "distance between the first state and the last that the threshold leaves (0.99: a hundredth); later: not "
    "before the last step.",
}


def print_dynamics(dynamics: Dynamics, console: Console | None = None, *, full: bool = False) -> None:
    """Print a sentence and a table for each measure: when each site settles, and each time's value with the last."""
    console = console or Console()
    for k, measure in enumerate(dynamics.values):
        if k:
            console.print()
        print_text(console, sentence(dynamics, measure), "bold")
        _print_table(dynamics, measure, console, full)
        if not dynamics.two_runs:
            print_text(console, SETTLED[dynamics[measure].closer], "dim")
        print_bullets(console, _caveats(dynamics, measure), "yellow")
    print_text(console, note_on_weights(dynamics.provenance), "yellow")


def _print_table(dynamics: Dynamics, measure: str, console: Console, full: bool) -> None:
    ends = dynamics.to_end(measure)
    titles, columns = dynamics.summary_columns(measure)
    heads = ["site", *(title.removeprefix("settled at ") for title in titles), CURVE]
    letters = max(min(SPARK, console.width // 4), len(CURVE))
    bars = BARS if (console.encoding or "utf-8").startswith("utf") else PLAIN_BARS
    low, high = _ends(ends, dynamics[measure].closer)
    rows = {}
    for s in shown_rows(len(dynamics.sites), full):
        curve = sparkline(ends[s], low, high, bars, letters)
        rows[s] = [visible(dynamics.sites[s]), *(column[s] for column in columns), curve]
    lines = with_gaps(console, rows, len(dynamics.sites))
    print_columns(console, heads, lines, left=(0, len(heads) - 1), names=(0,))


def _ends(ends: np.ndarray, closer: str) -> tuple[float, float]:
    """The least and the most alike value of a table, so that its small curves have one scale."""
    known = ends[np.isfinite(ends)]
    if not known.size:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    return (low, high) if closer == "up" else (high, low)


def sparkline(values: np.ndarray, far: float, near: float, bars: str = BARS, most: int = SPARK) -> str:
    """One letter per time, higher if nearer; at most `most` times at even distances."""
    picked = values[np.unique(np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int))]
    if math.isclose(far, near, rel_tol=1e-5):  # apart by rounding alone
        return "".join(bars[-1] if np.isfinite(v) else " " for v in picked)
    heights = (picked - far) / (near - far)
    return "".join(bars[round(float(h) * (len(bars) - 1))] if np.isfinite(h) else " " for h in heights)


def sentence(dynamics: Dynamics, measure: str) -> str:
    """A sentence that sums up a measure."""
    name = visible(measure)
    ends = dynamics.to_end(measure)
    if dynamics.two_runs:
        last = ends[:, -1]
        if np.isnan(last).all():
            return f"{name} of the last states is undefined at every site."
        key = last if dynamics[measure].closer == "up" else -last
        near, far = int(np.nanargmax(key)), int(np.nanargmin(key))
        text = f"At the end {in_a_sentence(dynamics.name_a)} and {in_a_sentence(dynamics.name_b)} are most alike at "
        text += f"{in_a_sentence(dynamics.sites[near])} ({number(last[near])})"
        if near != far:
            text += f" and least at {in_a_sentence(dynamics.sites[far])} ({number(last[far])})"
        return f"{text}, by {name}."
    values, first = dynamics[measure], ends[:, 0]
    distance = first if values.closer == "down" else -first
    if np.isnan(distance).all():
        return f"By {name}, nothing can be said: the values of the first state with the last are undefined."
    settled = dynamics.settled(measure=measure)
    start, end = dynamics.steps_a[0], dynamics.steps_a[-1]
    if len(dynamics.steps_a) > 1 and all(step == start for step in settled.values()):
        return f"By {name}, nothing moved: every site stays within 0.99 of its last state from step {start} on."
    most = int(np.nanargmax(distance))
    text = f"By {name}, {in_a_sentence(dynamics.sites[most])} moved most ({number(first[most])} between step {start} "
    text += f"and step {end})"
    known = {site: step for site, step in settled.items() if step not in (None, end)}  # the end is near itself
    if (step := known.get(dynamics.sites[most])) is not None:
        text += f" and came within 0.99 of its last state at step {step}"
    elif not known:
        return f"{text}; no site came within 0.99 of its last state before it."
    else:
        text += " and was not within 0.99 of its last state before that"
    order = dynamics.order(measure=measure)
    others = {site: step for site, step in known.items() if site != dynamics.sites[most]}
    early, late = (pick(known, key=known.__getitem__) for pick in (min, max))
    for site, place in ((early, "first"), (late, "last")):
        if site in others and known[early] < known[late]:
            text += f"; {in_a_sentence(site)} settled {place} (step {known[site]})"
    if order.correlation is None or len(known) < 3 or len(known) < len(settled):  # of two it is always 1 or -1
        return f"{text}."
    way = "bottom-up" if order.correlation > 0 else "top-down" if order.correlation < 0 else "neither way"
    return f"{text}; step and depth correlate by {order.correlation:+.2f} over {len(known)} sites ({way})."


def _caveats(dynamics: Dynamics, measure: str) -> list[str]:
    """Each caveat once, with the sites that it concerns."""
    grouped: dict[str, dict[str, None]] = {}
    for caveat in dynamics[measure].caveats:
        sites = grouped.setdefault(visible(caveat.text), {})
        sites |= {} if caveat.site_a is None else {caveat.site_a: None}
    every = (0, len(dynamics.sites))
    return [
        f"{text} ({'concerns all sites' if len(sites) in every else listed(list(sites), 'sites')})"
        for text, sites in grouped.items()
    ]


def render(dynamics: Dynamics) -> str:
    """The page of dynamics."""
    lines = [sentence(dynamics, measure) for measure in dynamics.values]
    return render_page(
        title=f"{listed([dynamics.name_a, dynamics.name_b] if dynamics.two_runs else [dynamics.name_a])} over time",
        question="How do they change alike?" if dynamics.two_runs else "Which layer settles when?",
        lead=lines[0] if lines else "Nothing was measured.",
        others=lines[1:],
        kind="measure",
        data=_contents(dynamics),
        scripts=_SCRIPTS,
        styles=("figures", "dynamics", "page"),
        note=note_on_weights(dynamics.provenance),
    )


def _contents(dynamics: Dynamics) -> dict[str, Any]:
    return {
        "ramp": RAMP,
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
    ends = data_scale(replace(values, value=dynamics.to_end(name)))
    place = {step: k for k, step in enumerate(dynamics.steps_a)}
    settled = [] if dynamics.two_runs else [dynamics.settled(t, name).values() for t in THRESHOLDS]
    last = len(dynamics.steps_a) - 1  # the last state is always near itself
    return {
        "name": visible(name),
        "sentence": sentence(dynamics, name),
        "value": packed(values.value),
        "n": values.n,
        "statistic": visible(values.statistic),
        "rule": "" if dynamics.two_runs else SETTLED[values.closer].removeprefix("Settled: "),
        "extent": extent(values.bounds),
        "same": values.same,
        **reading(values),
        "ends": [ends.far, ends.alike],
        "settled": [
            [None if step is None or place[step] == last else place[step] for step in steps] for steps in settled
        ],
        "caveats": _caveats(dynamics, name),
    }
