"""The leaderboard of measures, on the terminal and as a page, and the cost of measures on the terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.text import Text

from ..results import Costs, Entry, Leaderboard, counted
from .page import render_page
from .terminal import print_columns, print_text, safe_text
from .words import flat, in_a_sentence, listed, note_on_weights, visible

_SCRIPTS = ("table", "leaderboard", "leaderboard_figures", "leaderboard_page")
WIDE = 100  # letters per line below which the means of untrained and consecutive networks are left out
_COLUMNS = (
    ("ρ", "spearman"),
    ("r", "pearson"),
    ("AUC", "auc"),
    ("random", "untrained"),
    ("conv.", "consecutive"),
    ("moved", "moved_in_vain"),
    ("noticed", "noticed"),
)


def print_leaderboard(board: Leaderboard, console: Console | None = None) -> None:
    """Print the measures, best first, with the numbers that sum them up; then failures."""
    console = console or Console()
    lines = sentences(board)
    print_text(console, lines[0], "bold")
    columns = _COLUMNS if console.width >= WIDE else [c for c in _COLUMNS if c[1] not in ("untrained", "consecutive")]
    rows: list[list[str | Text]] = [
        [
            "" if row["rank"] is None else str(row["rank"]),
            safe_text(console, visible(row["measure"]), "dim" if row["rank"] is None else ""),
            *(_number(row[key], 2) for _, key in columns),
            "" if row["seconds"] is None else _number(1000 * row["seconds"], 1),
        ]
        for row in board.rows()
    ]
    print_columns(console, ["", "measure", *(title for title, _ in columns), "ms"], rows, left=(1,))
    for text in (*lines[1:], READING):
        print_text(console, text, "dim")
    for entry in board:
        for why in entry.undefined.values():
            print_text(console, f"- {visible(entry.name)}: {visible(why)}", "dim")
        for stage, why in entry.failures.items():
            print_text(console, f"- {visible(entry.name)}, {stage}: {visible(why)}", "yellow")


READING = (
    "ρ, r: mean correlation with agreement over kinds of pairs. AUC: consecutive checkpoints against untrained "
    "networks (random, conv.: the mean value of each). moved: the largest move of the value while the function stayed "
    "the same (0 best; 1 as for untrained networks). noticed: its move when the function was broken (1 best). "
    "ms: for one pair."
)


def sentences(board: Leaderboard) -> list[str]:
    """Sentences that sum up the leaderboard, the headline first."""
    ranked = [entry for entry in board if entry.correlation() is not None]
    scale, data = board.scale["name"], board.data
    setting = (
        f"Scale “{scale}”: {data['networks']} networks from {data['runs']} training runs on {data['name']}, "
        f"{sum(board.pairs.values()):,} pairs, {data['test']} test images."
    )
    if not ranked:
        return ["No measure could be tested on all kinds of pairs.", setting, *_undefined(board), *_failed(board)]
    first, level = ranked[0], _level(board)
    name = in_a_sentence(first.name)
    claim = f"{name} comes first, but is not alone" if level else f"{name} says best what networks do"
    lead = (
        f"{claim}: Spearman’s ρ of {first.correlation():.2f} with the "
        f"share of images they agree on, the mean over pairs that differ in {listed(list(first.grounding))}."
    )
    tied = (
        f"{len(level) or 'None'} of the other {counted(len(ranked) - 1, 'measure')} cannot be distinguished from it: "
        "resampling the training runs, "
        "the interval of the difference holds 0 for every kind of pair."
    )
    apart = [entry for entry in board if entry.auc == 1]
    fooled = [entry for entry in board if (entry.moved_in_vain or 0) >= 1]
    tried = [entry for entry in board if entry.moved_in_vain is not None]
    return [
        lead,
        *([tied] if len(ranked) > 1 else []),
        f"{len(apart) or 'None'} of {len(board)} {'separates' if len(apart) == 1 else 'separate'} consecutive "
        "checkpoints from untrained networks without overlap.",
        f"Without a change to what the network does, {len(fooled) or 'none'} of {len(tried)} could be moved as far "
        "as untrained networks are apart, or farther.",
        setting,
        *_undefined(board),
        *_failed(board),
    ]


def _level(board: Leaderboard) -> list[Entry]:
    """The measures that cannot be distinguished from the first, for any kind of pair."""
    level = []
    for entry in board:
        reaches = [kind.get("over_models") for kind in entry.against.values()]
        holds_0 = bool(reaches) and all(reach is not None and reach[0] <= 0 <= reach[1] for reach in reaches)
        if holds_0 and entry.name != board.leader and entry.correlation() is not None:
            level.append(entry)
    return level


def _undefined(board: Leaderboard) -> list[str]:
    """A sentence for each set of kinds of pairs for which some measures are not defined."""
    by_kinds: dict[tuple[str, ...], list[str]] = {}
    for entry in board:
        if entry.undefined:
            by_kinds.setdefault(tuple(entry.undefined), []).append(entry.name)
    return [
        f"{len(names)} of {len(board)} {'is' if len(names) == 1 else 'are'} not defined for networks that differ in "
        f"{listed(kinds)}, and without a rank: {listed(names)}."
        for kinds, names in by_kinds.items()
    ]


def _failed(board: Leaderboard) -> list[str]:
    failed = [entry.name for entry in board if entry.failures]
    return [f"{len(failed)} of {len(board)} failed somewhere: {listed(failed)}."] if failed else []


def render(board: Leaderboard) -> str:
    """The page of a leaderboard."""
    lines = sentences(board)
    return render_page(
        title=f"{counted(len(board), 'measure')} put to the test",
        question="Is this measure any good?",
        lead=lines[0],
        others=lines[1:],
        kind="fact",
        data=_contents(board),
        scripts=_SCRIPTS,
        styles=("figures", "leaderboard", "page"),
    )


def _contents(board: Leaderboard) -> dict[str, Any]:
    return {
        "rows": [{**row, "measure": visible(row["measure"])} for row in board.rows()],
        "entries": [_entry(entry) for entry in board],
        "kinds": board.pairs,
        "groups": board.conditions,
        "leader": None if board.leader is None else visible(board.leader),
        "level": [visible(entry.name) for entry in _level(board)],
        "leftOut": {visible(name): visible(why) for name, why in board.left_out.items()},
        "scale": [list(line) for line in flat({"scale": board.scale, "data": board.data})],
        "provenance": [list(line) for line in flat(board.provenance)],
        "order": "By the mean of ρ over kinds of pairs; below each its interval, over training runs.",
    }


def _entry(entry: Entry) -> dict[str, Any]:
    grounding = {kind: {k: v for k, v in one.items() if k != "values"} for kind, one in entry.grounding.items()}
    return {
        "name": visible(entry.name),
        "of": entry.of,
        "closer": entry.closer,
        "notes": [visible(note) for note in entry.notes],
        "failures": {stage: visible(why) for stage, why in entry.failures.items()},
        "undefined": [visible(why) for why in entry.undefined.values()],
        "calibration": entry.calibration,
        "grounding": grounding,
        "against": entry.against,
        "manipulation": entry.manipulation,
    }


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.0f}" if abs(value) < 1e5 else f"{value:.0e}"


# The cost of measures

_STEPS = ("", "k", "M", "G", "T", "P")


def print_costs(costs: Costs, console: Console | None = None) -> None:
    """Print a line for each measure and number of inputs, with its cost as a multiple of the cheapest."""
    console = console or Console()
    names = " and ".join(dict.fromkeys(visible(name) for name in costs.models))
    print_text(console, f"One pair of models ({names}), on {visible(costs.device)}", "bold")
    least = min((cost.flops for cost in costs if cost.flops), default=0)
    rows = []
    for cost in costs:
        times = cost.flops / least if least else math.nan
        rows.append(
            [
                visible(cost.measure),
                "none" if cost.probes is None else f"{cost.probes:,}",
                *(_short(flops) for flops in (cost.flops, cost.forward_flops, cost.measure_flops)),
                "" if math.isnan(times) else f"{times:,.3g}" if times < 1000 else f"{times:.1e}",
                _time(cost.seconds),
                f"{_short(cost.peak_bytes)}B",
            ]
        )
    print_columns(console, ["measure", "inputs", "FLOPs", "forward", "own", "× least", "time", "memory"], rows)
    for text in _explanations(costs):
        print_text(console, text, "dim")
    print_text(console, note_on_weights(costs.provenance), "yellow")


def _explanations(costs: Costs) -> list[str]:
    """Sentences on what the numbers count."""
    own = {cost.measure: cost for cost in costs}
    sites = sorted({cost.sites for cost in own.values()})
    lines = [
        "FLOPs: multiplications and additions of products, convolutions and factorisations, in both forward passes and "
        f"in the measure itself, for {' or '.join(map(str, sites))} values. Elementwise work is not counted.",
        f"memory: the most {visible(costs.memory)} at a time, beyond the models and the inputs. Rows of activations: "
        f"{visible(costs.rows_rule)}.",
    ]
    for cost in own.values():
        if cost.unknown:
            lines.append(f"{visible(cost.measure)} also ran {', '.join(map(visible, cost.unknown))}: not counted.")
    return lines


def _short(number: float) -> str:
    step = 0
    while number >= 999.5 and step + 1 < len(_STEPS):
        number, step = number / 1000, step + 1
    return f"{number:.3g} {_STEPS[step]}" if step else f"{number:.3g} "


def _time(seconds: float) -> str:
    unit, length = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    return f"{seconds / length:.3g} {unit}"
