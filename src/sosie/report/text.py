"""Results on the terminal. Names are printed as they are: never as markup, never as an escape sequence."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..results import (
    LEVEL,
    MEAN_EMBEDDING,
    TRANSFER,
    Comparison,
    Comparisons,
    Estimate,
    Summary,
    by_chance,
    correction,
    decisive_p,
    in_order,
    least_first,
    over_sites,
    sites_least_first,
    stars,
    summarise,
    written_p,
)
from .page import sentences
from .words import caveat_groups, note_on_weights, sentence, sentence_of_all, shorten, visible

MOST_ROWS = 24  # a longer table is cut in the middle
MOST_CAVEATS = 12
_UNCLEAR = "?"  # behind a value that is not distinguishable from chance; seen without colour, in any encoding
_BOUNDLESS = 100_000  # letters per line, to ask how many a table would take
NARROWEST = 12  # letters a layer's name keeps, however narrow the terminal
_PLAINER = str.maketrans({"…": "~", "±": "+-", "≤": "<="})  # for terminals that know no more than ASCII


def print_comparison(result: Comparison | Comparisons, console: Console | None = None, *, full: bool = False) -> None:
    """Print what was found: a sentence, a table of best matches and the caveats, for each measure.

    Long tables are cut in the middle unless `full`; of several models, `full` also prints each pair's tables.
    """
    console = console or Console()
    every = list(result) if isinstance(result, Comparisons) else [result]
    _print_found(result, every, console, full)
    print_note(console, note_on_weights(*(each.provenance for each in every)))


def print_note(console: Console, text: str) -> None:
    if text:
        console.print(safe_text(console, text, "yellow"))


def _print_found(result: Comparison | Comparisons, every: list[Comparison], console: Console, full: bool) -> None:
    if every and all(each.kind == "transfer" for each in every):
        print_transfer(result, console, full=full)
        return
    if isinstance(result, Comparisons):
        _print_models(result, console, full)
        return
    if result.values and len(result.side_a.sites) == len(result.side_b.sites) == 1:
        _print_one_pair(result, console)
        return
    if result.values and (in_order(result) or result.kind == "shifts"):
        print_in_order(result, console)
        return
    for k, measure in enumerate(result.values):
        if k:
            console.print()
        console.print(safe_text(console, sentence(result, measure), "bold"))
        print_whole(_matches(result, measure, console, full), console)
        _legend(result[measure], console)
        lines = [f"{group.text} ({group.reach})" for group in caveat_groups(result, measure)]
        hidden = 0 if full else max(len(lines) - MOST_CAVEATS, 0)
        _bullets(console, lines[: len(lines) - hidden] + [f"… {hidden} more"] * bool(hidden), "yellow")
    if not result.values:
        console.print("Nothing was measured.")


def _print_one_pair(result: Comparison, console: Console) -> None:
    """One site on each side, as outputs have it: a line for each measure."""
    names = " and ".join(shorten(visible(side.name), 60) for side in (result.side_a, result.side_b))
    count = next(iter(result.values.values())).n
    console.print(safe_text(console, f"{names}, {count:,} inputs", "bold"))
    rows = [[visible(name), *_one_pair_cells(values)] for name, values in result.values.items()]
    titles = ["measure", "value", "interval", "chance"]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    room = max(console.width - sum(widths[1:]) - 3 * len(titles), NARROWEST)
    cells = ([safe_text(console, shorten(name, room)), *numbers] for name, *numbers in rows)
    print_columns(console, titles, cells, gap=3)
    _bullets(console, [f"{text} ({', '.join(which)})" for text, which in _by_text(result).items()], "yellow")


def _one_pair_cells(values: Estimate) -> list[str]:
    """Value, interval and chance; empty where there is none."""
    between = chance = ""
    if values.low is not None and values.high is not None:
        between = f"{_number(values.low.item())} to {_number(values.high.item())}"
    if values.null is not None:
        spread = "" if values.null_spread is None else f" (sd {_number(values.null_spread.item())})"
        chance = f"{_number(values.null.item())}{spread}"
    return [_number(values.value.item()), between, chance]


def safe_text(console: Console, text: str, style: str = "") -> Text:
    """Text without markup."""
    return Text(_letters(console, text), style)


def print_columns(
    console: Console,
    heads: Sequence[str | Text],
    rows: Iterable[Sequence[Any]],
    *,
    left: Collection[int] = (0,),
    gap: int = 2,
) -> None:
    """A table without a frame; the columns named in `left` are text, the others numbers. No cell is cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if gap == 2 else (0, 1))
    for k, head in enumerate(heads):
        justify: JustifyMethod = "left" if k in left else "right"
        table.add_column(head, justify=justify, no_wrap=True, overflow="crop", vertical="bottom")
    for row in rows:
        table.add_row(*row)
    print_whole(table, console)


def print_whole(table: Table, console: Console) -> None:
    """A table with every cell as wide as it is. What may be shortened has been: rich would go on and cut numbers, too.

    A line that is longer than the terminal after all goes on in the next one.
    """
    table.width = Measurement.get(console, console.options.update(max_width=_BOUNDLESS), table).maximum
    console.print(table, crop=False)


def _letters(console: Console, text: str) -> str:
    """What this terminal can show; letters its encoding lacks are spelt out instead of raising."""
    encoding = console.encoding or "utf-8"
    if encoding.startswith("utf"):
        return visible(text)
    return visible(text).translate(_PLAINER).encode(encoding, "backslashreplace").decode(encoding)


def _bullets(console: Console, texts: list[str], style: str = "") -> None:
    table = Table.grid(padding=(0, 1))
    for text in texts:
        table.add_row("-", safe_text(console, text, style))
    if texts:
        console.print(table)


def _legend(values: Estimate, console: Console) -> None:
    """What p and the sign mean, where there is a p."""
    if decisive_p(values) is not None:
        levels = f"* p ≤ {LEVEL:g}, ** p ≤ 0.01, *** p ≤ 0.001"
        text = f"{levels}; {_UNCLEAR} and n.s.: not distinguishable from chance (p {correction(values)})."
        console.print(safe_text(console, text, "dim"))


def _matches(result: Comparison, measure: str, console: Console, full: bool) -> Table:
    summary = summarise(result, measure)
    names = [_letters(console, side.name) for side in (result.side_a, result.side_b)]
    shown = _shown(len(result.side_a.sites), full)
    crowded = len(_titles(result[measure])) > 3
    gap = 2 if crowded else 3
    visible_in_two = np.nanmax(np.abs(summary.best), initial=0) >= 0.1
    for digits in (3, 2)[: 1 + visible_in_two]:  # one digit less where names would have to be cut for it
        heads = [names[0], f"best in {names[1]}", *_titles(result[measure])]
        rows = [_row(result, summary, i, console, digits) for i in shown]
        plain = [[str(cell) for cell in row] for row in rows]
        lines = [[max(map(len, head.split("\n")), default=0) for head in heads], *([len(c) for c in r] for r in plain)]
        widths = [max(column) for column in zip(*lines, strict=True)]
        room = console.width - sum(widths[2:]) - gap * len(heads)
        if not crowded or sum(max(len(row[k]) for row in plain) for k in (0, 1)) <= room:
            break
    least = min(NARROWEST, max((len(row[k]) for row in plain for k in (0, 1)), default=NARROWEST))  # heads may be cut
    rooms = _rooms(widths[0], widths[1], room, least)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if crowded else (0, 1))
    for k, title in enumerate(heads):
        name = shorten(title, rooms[k]) if k < 2 else title
        head = Text(name if "\n" in name else _letters(console, name))
        table.add_column(head, justify="left" if k < 2 else "right", no_wrap=True, overflow="crop")
    for row, text in zip(rows, plain, strict=True):
        cells = (
            safe_text(console, shorten(name, most)) if name else "" for name, most in zip(text, rooms, strict=False)
        )
        table.add_row(*cells, *row[2:], style="dim" if not text[1] else "")
    return table


def _titles(values: Estimate) -> list[str]:
    """Of the columns of numbers: value, how far it can be trusted, and the value at the same depth."""
    ranged = ["interval"] if values.low is not None and values.high is not None else []
    chance = ["chance"] if values.null is not None else []
    p = ["p"] if decisive_p(values) is not None else []
    return ["value", *ranged, *chance, *p, "same\ndepth" if chance or p else "same depth"]


def _row(result: Comparison, summary: Summary, i: int | None, console: Console, digits: int) -> list[Text]:
    """A layer of A, its best match, the numbers in the order of their titles."""
    values = result[summary.measure]
    if i is None:
        hidden = len(result.side_a.sites) - MOST_ROWS
        return [Text(f"… {hidden} more"), *[Text()] * (1 + len(_titles(values)))]
    j = summary.best_partner[i]
    names = [result.side_a.sites[i], "none" if j is None else result.side_b.sites[j]]
    return [
        *(Text(_letters(console, name)) for name in names),
        _value(values, i, j, digits),
        *(Text(_letters(console, cell)) if cell else Text() for cell in _uncertainty(values, i, j, digits)),
        _value(values, i, summary.depth_partner[i], digits),
    ]


def _value(values: Estimate, i: int, j: int | None, digits: int) -> Text:
    """Dimmed and marked where chance could have given it; the mark has its own column of letters."""
    chance = by_chance(values)
    text = _number(float("nan") if j is None else values.value[i, j], digits)
    if chance is None:
        return Text(text)
    unclear = j is not None and chance[i, j]
    return Text(text + (_UNCLEAR if unclear else " "), "dim" if unclear else "")


def _uncertainty(values: Estimate, i: int, j: int | None, digits: int) -> list[str]:
    """Interval, chance and p of a pair, those that there are."""
    cells, p = [], decisive_p(values)
    if values.low is not None and values.high is not None:
        low, high = (np.nan if j is None else bound[i, j] for bound in (values.low, values.high))
        cells.append(f"[{_number(low, digits)}, {_number(high, digits)}]" if np.isfinite([low, high]).all() else "")
    if values.null is not None:
        spread = "" if j is None or values.null_spread is None else f"±{_number(values.null_spread[i, j], digits)}"
        cells.append("" if j is None else f"{_number(values.null[i, j], digits)}{spread}")
    if p is not None:
        known = np.nan if j is None else float(p[i, j])
        marks = stars(known)
        cells.append(f"{written_p(known)} {marks:<4}" if marks and digits > 2 else marks)
    return cells


def _rooms(one: int, other: int, total: int, least: int) -> tuple[int, int]:
    """Share a line between two columns of names: the shorter takes what it needs, the longer the rest."""
    half = max(total // 2, least)
    if one + other <= total:
        return one, other
    if one <= half:
        return one, max(total - one, least)
    return (max(total - other, least), other) if other <= half else (half, half)


def _shown(count: int, full: bool) -> list[int | None]:
    """Row numbers; None stands for the rows left out."""
    if full or count <= MOST_ROWS + 1:
        return list(range(count))
    half = MOST_ROWS // 2
    return [*range(half), None, *range(count - half, count)]


def _number(value: float, digits: int = 3) -> str:
    if not np.isfinite(value):
        return "undefined"
    if digits == 2 and abs(value) < 5e-3:
        return "0.00"
    return f"{value:.{digits}f}" if value == 0 or 5e-4 <= abs(value) < 1000 else f"{value:.3g}"


def _print_models(result: Comparisons, console: Console, full: bool) -> None:
    for text, measure in zip(sentences(result), next(iter(result)).values if result.pairs else (), strict=False):
        console.print(safe_text(console, text, "bold"))
        _print_matrix(result, measure, console)
    if not full:
        _bullets(console, [sentence(pair, next(iter(pair.values))) for pair in result if pair.values])
        return
    for comparison in result:
        console.print()
        _print_found(comparison, [comparison], console, full=True)


def _print_matrix(result: Comparisons, measure: str, console: Console) -> None:
    """Model by model, as many columns as fit; the page has them all."""
    fitting = max((console.width - 24) // 12, 1)
    heads = [safe_text(console, shorten(visible(name), 9)) for name in result.names[:fitting]]
    more = [safe_text(console, f"… {len(result.names) - fitting} more")] if len(result.names) > fitting else []
    rows = (
        [safe_text(console, shorten(visible(name), 20)), *map(_number, row[:fitting]), *[""] * len(more)]
        for name, row in zip(result.names, result.matrix(measure), strict=True)
    )
    print_columns(console, ["", *heads, *more], rows, left=(0, fitting + 1), gap=3)


# Layers paired one to one, or shifts, on the terminal: a line for each, a column for each measure

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
    head = "shift" if result.kind == "shifts" else "layer"
    for some in _fitting(columns, console.width - max(room, len(head)) - 2):
        rows = (
            [safe_text(console, shorten(site, room)), *(safe_text(console, cells[k]) for _, cells in some)]
            for k, site in enumerate(sites)
        )
        print_columns(console, [head, *(title for title, _ in some)], rows)
    everywhere = len(result.values)
    said = _by_text(result).items()
    texts = [text if len(names) == everywhere else f"{text} ({', '.join(names)})" for text, names in said]
    _bullets(console, texts, "yellow")


def _by_text(result: Comparison) -> dict[str, list[str]]:
    """Every caveat once, with the measures that it is about."""
    measures: dict[str, list[str]] = {}
    for name in result.values:
        for group in caveat_groups(result, name):
            measures.setdefault(group.text, []).append(name)
    return measures


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
    if result.kind == "shifts" or values.null is None or values.null_spread is None:
        return []
    pairs = zip(np.diag(values.null), np.diag(values.null_spread), strict=True)
    return [("by\nchance", [f"{_number(null)}±{_number(spread)}" for null, spread in pairs])]


# Transfer scores on the terminal: layers and models, those with least to adapt first

_LEAST = "smallest mean_embedding first: least to adapt"


def print_transfer(result: Comparison | Comparisons, console: Console, *, full: bool) -> None:
    """A table of the layers of a model; of several models one of the models, and with `full` one for each."""
    if isinstance(result, Comparison):
        _print_layers(result, console, full)
        return
    ranked = least_first(result)
    console.print(safe_text(console, sentence_of_all(result, MEAN_EMBEDDING), "bold"))
    several = len({c.side_b.name for c in ranked}) > 1
    names = [visible(c.side_a.name) + (f" on {visible(c.side_b.name)}" if several else "") for c in ranked]
    cells = [[_digits(over_sites(c, name)) for name in TRANSFER] for c in ranked]
    _table("model", names, cells, console)
    console.print(safe_text(console, f"Means over layers, {_LEAST}.", "dim"))
    if not full:
        _bullets(console, [sentence(c, MEAN_EMBEDDING) for c in ranked])
        _print_caveats(ranked, console)
    for comparison in ranked if full else ():
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
    _print_caveats([result], console)


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
    lines = ([safe_text(console, shorten(name, room)), *row] for name, row in zip(names, rows, strict=True))
    print_columns(console, [title, *titles], lines)


def _print_caveats(results: Sequence[Comparison], console: Console) -> None:
    """Every caveat once, with the scores and, where they are not all of them, the layers that it is about."""
    abouts: dict[str, dict[str, None]] = {}
    for result in results:
        for name in result.values:
            for group in caveat_groups(result, name):
                sites = [] if group.everywhere else [result.side_a.sites[i] for i, _ in group.where if i is not None]
                about = f"{name} of {', '.join(map(visible, sites))}" if sites else name
                abouts.setdefault(group.text, {})[about] = None
    _bullets(console, [f"{text} ({', '.join(about)})" for text, about in abouts.items()], "yellow")
