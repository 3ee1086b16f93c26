"""Transfer scores on the terminal: layers and models, those with least to adapt first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ..results import MEAN_EMBEDDING, TRANSFER, Comparison, Comparisons, least_first, over_sites, sites_least_first
from .text import MOST_ROWS, NARROWEST, _bullets, print_whole, safe_text
from .words import doubts, sentence, sentence_of_all, shorten, visible

_LEAST = "smallest mean_embedding first: least to adapt"


def print_transfer(result: Comparison | Comparisons, console: Console, *, full: bool) -> None:
    """A table of the layers of a model; of several models one of the models, and with `full` one for each."""
    if isinstance(result, Comparison):
        _print_layers(result, console, full)
        return
    found = least_first(result)
    console.print(safe_text(console, sentence_of_all(result, MEAN_EMBEDDING), "bold"))
    several = len({c.side_b.name for c in found}) > 1
    names = [visible(c.side_a.name) + (f" on {visible(c.side_b.name)}" if several else "") for c in found]
    cells = [[_digits(over_sites(c, name)) for name in TRANSFER] for c in found]
    _table("model", names, cells, console)
    console.print(safe_text(console, f"Means over layers, {_LEAST}.", "dim"))
    if not full:
        _bullets(console, [sentence(c, MEAN_EMBEDDING) for c in found])
        _print_doubts(found, console)
    for comparison in found if full else ():
        console.print()
        _print_layers(comparison, console, full)


def _print_layers(result: Comparison, console: Console, full: bool) -> None:
    console.print(safe_text(console, sentence(result, MEAN_EMBEDDING), "bold"))
    order = sites_least_first(result)
    shown = order if full or len(order) <= MOST_ROWS + 1 else order[:MOST_ROWS]
    cells = [[_digits(values.value[k, 0]) for values in result.values.values()] for k in shown]
    _table("layer", [f"{k + 1} {visible(result.side_a.sites[k])}" for k in shown], cells, console)
    hidden = f"; {len(order) - len(shown)} more: --full" if len(shown) < len(order) else ""
    console.print(safe_text(console, f"Numbered from the input on, {_LEAST}{hidden}.", "dim"))
    wide = {}
    for name, values in result.values.items():
        if values.low is not None and values.high is not None:
            reach = (values.high - values.low) / 2
            if name.startswith("log"):
                wide[name] = f"{name} ± {float(reach.max()):.2g}"
            else:
                wide[name] = f"{name} ± {float((reach / values.value).max()):.0%}"
    if wide:
        text = f"Sampled or sketched, the 95 % intervals at their widest: {', '.join(wide.values())}."
        console.print(safe_text(console, text, "dim"))
    _print_doubts([result], console)


def _digits(value: float) -> str:
    """Three significant digits: scores lie orders of magnitude apart."""
    return f"{value:.3g}" if math.isfinite(value) else "undefined"


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    titles = [name.replace("_", "\n") for name in TRANSFER]
    taken = sum(
        max(*(len(part) for part in head.split("\n")), *(len(row[k]) for row in rows)) + 2
        for k, head in enumerate(titles)
    )
    room = max(console.width - taken - 2, NARROWEST)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(title, no_wrap=True, overflow="crop", vertical="bottom")
    for head in titles:
        table.add_column(head, justify="right", no_wrap=True, overflow="crop", vertical="bottom")
    for name, row in zip(names, rows, strict=True):
        table.add_row(safe_text(console, shorten(name, room)), *row)
    print_whole(table, console)


def _print_doubts(results: Sequence[Comparison], console: Console) -> None:
    """Every caveat once, with the scores and, where they are not all of them, the layers that it is about."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for name in result.values:
            for doubt in doubts(result, name):
                sites = [] if doubt.everywhere else [result.side_a.sites[i] for i, _ in doubt.where if i is not None]
                about = f"{name} of {', '.join(map(visible, sites))}" if sites else name
                found.setdefault(doubt.text, {})[about] = None
    _bullets(console, [f"{text} ({', '.join(about)})" for text, about in found.items()], "yellow")
