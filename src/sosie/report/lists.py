"""Lists on the terminal: measures, sites of a model, rows of a zoo, costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..results import Costs, cell, counted
from .terminal import NARROWEST, print_columns, print_text, safe_text, table_width
from .words import direction, extent, note_on_weights, shorten, size, visible


def print_measures(facts: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the facts of each measure: what it is, its range and direction, what leaves it unchanged."""
    console = console or Console()
    table = Table.grid(padding=(0, 2, 1, 0), collapse_padding=False)
    table.add_column(no_wrap=True, overflow="crop")
    table.add_column(overflow="fold")
    for fact in facts:
        lines = [
            safe_text(console, fact["summary"] or "-"),
            *(safe_text(console, line, "dim") for line in _facts(fact)),
        ]
        table.add_row(safe_text(console, fact["name"], "bold"), Text("\n").join(lines))
    console.print(table)


def print_sites(
    name: str, sites: Sequence[tuple[str, tuple[int, ...], int, str]], console: Console | None = None
) -> None:
    """Print what can be compared in a model: label, shape of one input's activation, width, kind."""
    console = console or Console()
    print_text(console, f"{visible(name)}: {counted(len(sites), 'site')}", "bold")
    rows = (
        [visible(label), size(shape), str(width), shorten(visible(kind), 24)] for label, shape, width, kind in sites
    )
    print_columns(console, ["site", "shape", "width", "kind"], rows, left=(0, 3), names=(0,), gap=3)


def _facts(fact: Mapping[str, Any]) -> list[str]:
    low_high = tuple(fact["bounds"])
    same = "no fixed value" if fact["same"] is None else f"{fact['same']:g}"
    reading = f"{extent((low_high[0], low_high[1]))}, {direction(fact['closer'])}, {same} with itself"
    traits = ["symmetric" if fact["symmetric"] else "not symmetric"]
    traits.append("differentiable" if fact["differentiable"] else "not differentiable")
    if fact["invariant"]:
        traits.insert(0, f"invariant to {', '.join(sorted(fact['invariant']))}")
    origin = [f"reads {fact['reads']}", f"cost {fact['cost']}" if fact["cost"] else "", fact["paper"] or ""]
    lines = [reading, "; ".join(traits), "; ".join(part for part in origin if part)]
    if fact["defaults"]:
        lines.append("defaults: " + ", ".join(f"{key}={value}" for key, value in fact["defaults"].items()))
    return lines


def print_numbers(title: str, numbers: Mapping[str, float], console: Console | None = None) -> None:
    """A title, and a line for each number."""
    console = console or Console()
    print_text(console, title, "bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in numbers.items():
        table.add_row(safe_text(console, name.replace("_", " ")), f"{value:.4g}")
    console.print(table)


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, console: Console | None = None
) -> None:
    """Rows of one form, a dict each: numbers to the right and always whole.

    Where a line is too short, headings of numbers are broken at their words and texts are shortened; then the last
    columns of text are left out, and a line below names them. The first column stays.
    """
    console = console or Console()
    names = list(rows[0]) if columns is None else list(columns)
    cells = {name: [visible(text) if (text := cell(row.get(name))) else "" for row in rows] for name in names}
    numbers = {name for name in names if _are_numbers([row.get(name) for row in rows])}
    titles = {name: name for name in names}
    widths = {name: table_width([name], [[text] for text in cells[name]]) for name in names}
    if sum(widths.values()) > console.width:
        titles |= {name: name.replace("_", "\n") for name in numbers}
        widths = {name: table_width([titles[name]], [[text] for text in cells[name]]) for name in names}
    least = {name: width if name in numbers else min(width, NARROWEST + 2) for name, width in widths.items()}
    kept = list(names)
    while sum(least[name] for name in kept) > console.width and (texts := [k for k in kept[1:] if k not in numbers]):
        kept.remove(texts[-1])
    left = [k for k, name in enumerate(kept) if name not in numbers]
    lines = zip(*(cells[name] for name in kept), strict=True)
    print_columns(console, [titles[name] for name in kept], lines, left=left)
    if left_out := [name for name in names if name not in kept]:
        print_text(console, f"left out, as the line is too short: {', '.join(left_out)}", "dim")


def _are_numbers(values: Sequence[Any]) -> bool:
    there = [value for value in values if value is not None]
    return bool(there) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in there)


# What measures cost, on the terminal

_STEPS = ("", "k", "M", "G", "T", "P")


def print_costs(costs: Costs, console: Console | None = None) -> None:
    """A line for each measure and number of inputs, with its cost as a multiple of the cheapest."""
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
    """What the numbers count."""
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
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
