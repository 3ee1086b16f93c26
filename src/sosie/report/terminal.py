"""Printing of texts, tables and lists. Names are never read as markup or escape sequences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..papers import cited
from ..results import cell as cell_text
from ..results import counted
from .words import direction, extent, shorten, size, visible

NARROWEST = 12  # letters that a name keeps, however narrow the terminal
MOST_ROWS = 24  # a longer table is cut in the middle
_BOUNDLESS = 100_000  # letters per line, to measure how wide a table is
_PLAINER = str.maketrans({"…": "~", "±": "+-", "≤": "<="})  # for terminals with ASCII only


def safe_text(console: Console, text: str, style: str | Style = "") -> Text:
    """Text that this terminal can show, without markup; letters that its encoding lacks are spelt out."""
    encoding, shown = console.encoding or "utf-8", visible(text)
    if not encoding.startswith("utf"):
        shown = shown.translate(_PLAINER).encode(encoding, "backslashreplace").decode(encoding)
    return Text(shown, style)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print a sentence, or nothing if it is empty."""
    if text:
        console.print(safe_text(console, text, style))


def print_bullets(console: Console, texts: Sequence[str], style: str = "") -> None:
    table = Table.grid(padding=(0, 1))
    for text in texts:
        table.add_row("-", safe_text(console, text, style))
    if texts:
        console.print(table)


def table_width(heads: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> int:
    """The width of a table if no cell is shortened."""
    return sum(_widths(heads, rows)) + 2 * len(heads)


def _widths(heads: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> list[int]:
    titles = [max(map(len, head.split("\n"))) for head in heads]
    return [max(column) for column in zip(titles, *([len(cell) for cell in row] for row in rows), strict=True)]


def print_columns(
    console: Console,
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left: Collection[int] = (0,),
    names: Collection[int] | None = None,
    gap: int = 2,
) -> None:
    """Print a table without a frame; columns in `left` are aligned to the left, the others are numbers.

    If a line is too long, the columns of `names` (by default those in `left`) are shortened in the middle, the widest
    first. Numbers are never cut: a line that is still too long continues in the next one.
    """
    names = left if names is None else names
    cells = [[_as_text(console, cell) for cell in row] for row in rows]
    widths = _widths(heads, cells)
    while sum(widths) + gap * len(widths) > console.width and (wide := [k for k in names if widths[k] > NARROWEST]):
        widths[max(wide, key=lambda k: widths[k])] -= 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if gap == 2 else (0, 1))
    for k, head in enumerate(heads):
        justify: JustifyMethod = "left" if k in left else "right"
        lines = [shorten(head, widths[k])] if k in names else head.split("\n")
        title = Text("\n").join(_as_text(console, line) for line in lines)
        table.add_column(title, justify=justify, no_wrap=True, overflow="crop", vertical="bottom")
    for row in cells:
        for k in names:
            row[k] = _as_text(console, shorten(row[k].plain, widths[k]), row[k].style)
        table.add_row(*row)
    # rich would cut numbers too unless the table has its full width.
    table.width = Measurement.get(console, console.options.update(max_width=_BOUNDLESS), table).maximum
    console.print(table, crop=False)


def _as_text(console: Console, cell: str | Text, style: str | Style = "") -> Text:
    if isinstance(cell, Text):
        return cell
    return safe_text(console, cell, style) if cell else Text()


def shown_rows(count: int, full: bool) -> list[int]:
    """The numbers of the rows that are shown: of a long table those at both ends."""
    half = MOST_ROWS // 2
    whole = full or count <= MOST_ROWS + 1
    return list(range(count)) if whole else [*range(half), *range(count - half, count)]


def with_gaps(console: Console, rows: Mapping[int, Sequence[str | Text]], count: int) -> list[Sequence[str | Text]]:
    """Some of `count` rows, by their numbers, and a line wherever others are left out."""
    lines: list[Sequence[str | Text]] = []
    before = -1
    for number in [*rows, count]:
        if left := number - before - 1:
            lines.append([safe_text(console, f"… {left} more", "dim"), *[""] * (len(next(iter(rows.values()))) - 1)])
        if number < count:
            lines.append(rows[number])
        before = number
    return lines


# Lists: measures, sites of a model, numbers, rows of a zoo


def print_measures(facts: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the facts of each measure: its summary, range, direction and invariances."""
    console = console or Console()
    table = Table.grid(padding=(0, 2, 1, 0), collapse_padding=False)
    table.add_column(no_wrap=True, overflow="crop")
    table.add_column(overflow="fold")
    for fact in facts:
        lines = [safe_text(console, fact["summary"] or "-")]
        lines += [safe_text(console, line, "dim") for line in _facts(fact)]
        table.add_row(safe_text(console, fact["name"], "bold"), Text("\n").join(lines))
    console.print(table)


def print_sites(
    name: str, sites: Sequence[tuple[str, tuple[int, ...], int, str]], console: Console | None = None
) -> None:
    """Print the sites of a model: label, shape of one input's activation, width, kind."""
    console = console or Console()
    print_text(console, f"{visible(name)}: {counted(len(sites), 'site')}", "bold")
    rows = (
        [visible(label), size(shape), str(width), shorten(visible(kind), 24)] for label, shape, width, kind in sites
    )
    print_columns(console, ["site", "shape", "width", "kind"], rows, left=(0, 3), names=(0,), gap=3)


def _facts(fact: Mapping[str, Any]) -> list[str]:
    same = "no fixed value" if fact["same"] is None else f"{fact['same']:g}"
    reading = f"{extent(fact['bounds'])}, {direction(fact['closer'])}, {same} with itself"
    traits = ["symmetric" if fact["symmetric"] else "not symmetric"]
    traits.append("differentiable" if fact["differentiable"] else "not differentiable")
    if fact["invariant"]:
        traits.insert(0, f"invariant to {', '.join(sorted(fact['invariant']))}")
    if fact.get("aligned_by"):
        traits.append(f"aligned by {fact['aligned_by']}")
    origin = [f"reads {fact['reads']}"] + ([f"cost {fact['cost']}"] if fact["cost"] else [])
    papers = [" ".join(paper) for paper in cited(fact["paper"] or "")] or ([fact["paper"]] if fact["paper"] else [])
    lines = [reading, "; ".join(traits), "; ".join(origin), *papers]
    if (package := fact.get("package", "sosie")) != "sosie":
        lines.append(f"from the package {package}")
    if fact["defaults"]:
        lines.append("defaults: " + ", ".join(f"{key}={value}" for key, value in fact["defaults"].items()))
    return lines


def print_numbers(title: str, numbers: Mapping[str, float], console: Console | None = None) -> None:
    """Print a title, and a line for each number."""
    console = console or Console()
    print_text(console, title, "bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in numbers.items():
        table.add_row(safe_text(console, name.replace("_", " ")), f"{value:.4g}")
    console.print(table)


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, console: Console | None = None
) -> None:
    """Print rows, one dict each, with numbers aligned to the right and always whole.

    If a line is too long, headings of numbers are broken between words and texts are shortened; then the last columns
    of text are left out, and a line below names them. The first column stays.
    """
    console = console or Console()
    names = list(rows[0]) if columns is None else list(columns)
    cells = {name: [visible(text) if (text := cell_text(row.get(name))) else "" for row in rows] for name in names}
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
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in known)
