"""Lists on the terminal: the measures there are, and the sites of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..results import Cost, Costs, counted
from .text import NARROWEST, print_columns, print_note, safe_text
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
    rows = [
        (visible(label), size(shape), str(width), shorten(visible(kind), 24)) for label, shape, width, kind in sites
    ]
    columns = zip(*(row[1:] for row in rows), ("shape", "width", "kind"), strict=True)
    room = max(console.width - 12 - sum(max(map(len, column)) for column in columns), NARROWEST)
    console.print(safe_text(console, f"{visible(name)}: {counted(len(sites), 'site')}", "bold"))
    cells = ([safe_text(console, text) for text in (shorten(label, room), *others)] for label, *others in rows)
    print_columns(console, ["site", "shape", "width", "kind"], cells, left=(0, 3), gap=3)


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
    console.print(safe_text(console, title, "bold"))
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in numbers.items():
        table.add_row(safe_text(console, name.replace("_", " ")), f"{value:.4g}")
    console.print(table)


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, console: Console | None = None
) -> None:
    """Rows of one form, a dict each: numbers to the right and always whole.

    Where a line is too short, headings of numbers are broken at their words and texts are shortened; then the last
    columns of text are left out, which is said below. The first column stays.
    """
    console = console or Console()
    names = list(rows[0]) if columns is None else list(columns)
    every = [_Column.of(name, [row.get(name) for row in rows]) for name in names]
    kept = _fitting(every, console.width)
    widths = _widths(kept, console.width)
    lines = (
        [safe_text(console, shorten(c, w)) if c else "" for c, w in zip(cells, widths, strict=True)]
        for cells in zip(*(column.cells for column in kept), strict=True)
    )
    left = [k for k, column in enumerate(kept) if not column.number]
    print_columns(console, [column.title for column in kept], lines, left=left)
    if left_out := [column.name for column in every if column.name not in {other.name for other in kept}]:
        console.print(safe_text(console, f"left out, as the line is too short: {', '.join(left_out)}", "dim"))


@dataclass(frozen=True)
class _Column:
    name: str
    title: str  # the name, perhaps on several lines
    cells: tuple[str, ...]
    number: bool

    @classmethod
    def of(cls, name: str, values: Sequence[Any]) -> _Column:
        return cls(name, name, tuple(map(_cell, values)), _are_numbers(values))

    def broken(self) -> _Column:
        return replace(self, title=self.name.replace("_", "\n")) if self.number else self

    @property
    def heading(self) -> int:
        """Letters that its heading takes."""
        return max(map(len, self.title.split("\n")))


def _fitting(columns: Sequence[_Column], room: int) -> list[_Column]:
    """Those that there is room for; all of the numbers even if there is none."""
    if _taken([max(map(len, (c.title, *c.cells))) for c in columns]) > room:
        columns = [column.broken() for column in columns]
    kept = list(columns)
    while _taken(_widths(kept, room)) > room and (texts := [column for column in kept[1:] if not column.number]):
        kept.remove(texts[-1])
    return kept


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * len(widths)


def _widths(columns: Sequence[_Column], room: int) -> list[int]:
    """Letters for each column: the widest text gives way first. A heading is not shortened, nor is a number."""
    widths = [max(column.heading, *map(len, column.cells)) for column in columns]
    least = [w if c.number else max(NARROWEST, c.heading) for c, w in zip(columns, widths, strict=True)]
    while _taken(widths) > room and (wide := [k for k, width in enumerate(widths) if width > least[k]]):
        widths[max(wide, key=lambda k: widths[k])] -= 1
    return widths


def _are_numbers(values: Sequence[Any]) -> bool:
    there = [value for value in values if value is not None]
    return bool(there) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in there)


def _cell(value: Any) -> str:
    if value is None or value == "" or value == []:
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(visible(str(item)) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else visible(str(value))


# What measures cost, on the terminal

_STEPS = ("", "k", "M", "G", "T", "P")


def print_costs(costs: Costs, console: Console | None = None) -> None:
    """A line for each measure and number of inputs, and how many times the least it takes."""
    console = console or Console()
    names = " and ".join(dict.fromkeys(visible(name) for name in costs.models))
    console.print(safe_text(console, f"One pair of models ({names}), on {visible(costs.device)}", "bold"))
    room = max(console.width - 62, NARROWEST)
    least = min((cost.flops for cost in costs if cost.flops), default=0)
    rows = (
        [
            safe_text(console, shorten(visible(cost.measure), room)),
            "none" if cost.probes is None else f"{cost.probes:,}",
            *_numbers(cost, least),
        ]
        for cost in costs
    )
    heads = ["measure", "inputs", "FLOPs", "forward", "own", "× least", "time", "memory"]
    print_columns(console, heads, rows)
    for text in sentences(costs):
        console.print(safe_text(console, text, "dim"))
    print_note(console, note_on_weights(costs.provenance))


def sentences(costs: Costs) -> list[str]:
    """What the numbers are of."""
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


def _numbers(cost: Cost, least: int) -> list[str]:
    times = f"{cost.flops / least:,.3g}" if least and cost.flops / least < 1000 else ""
    if least and not times:
        times = f"{cost.flops / least:.1e}"
    flops = [_short(number) for number in (cost.flops, cost.forward_flops, cost.measure_flops)]
    return [*flops, times, _time(cost.seconds), f"{_short(cost.peak_bytes)}B"]


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
