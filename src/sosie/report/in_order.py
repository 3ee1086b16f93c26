"""Layers paired one to one, or shifts, on the terminal: a line for each, a column for each measure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..results import Comparison, is_shifted
from .text import NARROWEST, _bullets, _number, print_whole, safe_text
from .words import doubts, sentence, shorten, visible

Column = tuple[str, list[str]]  # its title and cells


def print_in_order(result: Comparison, console: Console) -> None:
    """What was found at each pair, intervals where there is room, and every caveat once."""
    console.print(safe_text(console, sentence(result, next(iter(result.values))), "bold"))
    sites = [
        a if a == b else f"{a} → {b}"
        for a, b in zip(map(visible, result.sites_a), map(visible, result.sites_b), strict=True)
    ]
    longest = max(map(len, sites))
    for intervals in (True, False):
        columns = []
        for k, name in enumerate(result.values):
            columns.append(_column(result, name, intervals=intervals and not k))
            columns += _chance(result, name)
        taken = sum(map(_width, columns))
        room = max(min(longest, console.width - taken - 2), min(longest, NARROWEST))
        if taken + room < console.width:
            break
    else:
        room = min(longest, max(NARROWEST, console.width // 3))
    head = "shift" if is_shifted(result) else "layer"
    for some in _fitting(columns, console.width - max(room, len(head)) - 2):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(head, no_wrap=True, overflow="crop")
        for title, _ in some:
            table.add_column(title, justify="right", no_wrap=True, overflow="crop", vertical="bottom")
        for k, site in enumerate(sites):
            table.add_row(safe_text(console, shorten(site, room)), *(safe_text(console, cells[k]) for _, cells in some))
        print_whole(table, console)
    found: dict[str, list[str]] = {}
    for name in result.values:
        for doubt in doubts(result, name):
            found.setdefault(doubt.text, []).append(name)
    everywhere = len(result.values)
    _bullets(
        console,
        [text if len(names) == everywhere else f"{text} ({', '.join(names)})" for text, names in found.items()],
        "yellow",
    )


def _width(column: Column) -> int:
    title, cells = column
    return max(map(len, (*title.split("\n"), *cells))) + 2


def _fitting(columns: list[Column], width: int) -> Iterator[list[Column]]:
    """As many at a time as fit into a table: half a number would pass for a whole one."""
    some: list[Column] = []
    for column in columns:
        if some and sum(map(_width, (*some, column))) > width:
            yield some
            some = []
        some.append(column)
    yield some


def _column(result: Comparison, name: str, *, intervals: bool) -> Column:
    values = result[name]
    cells = [_number(value) for value in np.diag(values.value)]
    if intervals and values.low is not None and values.high is not None:
        edges = zip(np.diag(values.low), np.diag(values.high), strict=True)
        cells = [f"{cell} [{_number(low)}, {_number(high)}]" for cell, (low, high) in zip(cells, edges, strict=True)]
    return visible(name).replace("_", "\n"), cells


def _chance(result: Comparison, name: str) -> list[Column]:
    """What chance gives at each layer, where it was measured: some values mean nothing without."""
    values = result[name]
    if is_shifted(result) or values.null is None or values.null_spread is None:
        return []
    pairs = zip(np.diag(values.null), np.diag(values.null_spread), strict=True)
    return [("by\nchance", [f"{_number(null)}±{_number(spread)}" for null, spread in pairs])]
