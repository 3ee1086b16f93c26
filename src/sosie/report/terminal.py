"""How anything is printed. Names appear as they are: never as markup, never as an escape sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .words import shorten, visible

NARROWEST = 12  # letters a name keeps, however narrow the terminal
MOST_ROWS = 24  # a longer table is cut in the middle
_BOUNDLESS = 100_000  # letters per line, to ask how many a table would take
_PLAINER = str.maketrans({"…": "~", "±": "+-", "≤": "<="})  # for terminals that know no more than ASCII


def safe_text(console: Console, text: str, style: str | Style = "") -> Text:
    """Text that this terminal can show, without markup; letters its encoding lacks are spelt out."""
    encoding, shown = console.encoding or "utf-8", visible(text)
    if not encoding.startswith("utf"):
        shown = shown.translate(_PLAINER).encode(encoding, "backslashreplace").decode(encoding)
    return Text(shown, style)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print a sentence; nothing where it is empty."""
    if text:
        console.print(safe_text(console, text, style))


def print_bullets(console: Console, texts: Sequence[str], style: str = "") -> None:
    table = Table.grid(padding=(0, 1))
    for text in texts:
        table.add_row("-", safe_text(console, text, style))
    if texts:
        console.print(table)


def table_width(heads: Sequence[str], rows: Iterable[Sequence[str | Text]], gap: int = 2) -> int:
    """Letters that a table takes if no cell is shortened."""
    return sum(_widths(heads, rows)) + gap * len(heads)


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
    """A table without a frame; columns in `left` are aligned to the left, the others are numbers.

    Where the line is too short, the columns of `names` (by default those in `left`) are shortened in the middle, the
    widest first. Numbers are never cut: a line that is still too long goes on in the next one.
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
    # rich would go on and cut numbers, too, unless it believes that there is room for all.
    table.width = Measurement.get(console, console.options.update(max_width=_BOUNDLESS), table).maximum
    console.print(table, crop=False)


def _as_text(console: Console, cell: str | Text, style: str | Style = "") -> Text:
    if isinstance(cell, Text):
        return cell
    return safe_text(console, cell, style) if cell else Text()


def shown_rows(count: int, full: bool) -> list[int | None]:
    """Row numbers; None stands for the rows left out."""
    if full or count <= MOST_ROWS + 1:
        return list(range(count))
    half = MOST_ROWS // 2
    return [*range(half), None, *range(count - half, count)]
