"""How rows are shown: cells as text, and an escaped table for notebooks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


MOST_SHOWN = 40  # rows in a notebook or a console


class Rows:
    """A sequence of the rows in `found`, one dict each."""

    found: tuple[dict[str, Any], ...]

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.found]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.found[index])


def cell(value: Any) -> str:
    """A value as text; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}" if math.isfinite(value) and 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def number(value: float, digits: int = 3) -> str:
    """A number as text with this many decimals, or three significant digits if decimals would not show it."""
    if not math.isfinite(value):
        return "undefined"
    if digits == 2 and abs(value) < 5e-3:
        return "0.00"
    return f"{value:.{digits}f}" if value == 0 or 5e-4 <= abs(value) < 1000 else f"{value:.3g}"


def counted(count: int, what: str) -> str:
    """A count with its noun, as in "1 model" and "2 models"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row of cells, in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def html_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    of: int | None = None,
    see: str = "rows()",
    faded: Collection[int] = (),
) -> str:
    """The first rows as an HTML table; `of`: the number of all rows, `see`: where to find the rest."""
    shown = rows[:MOST_SHOWN]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = []
    for k, row in enumerate(shown):
        style = ' style="opacity:0.6"' if k in faded else ""
        body.append(f"<tr{style}>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>")
    left = (len(rows) if of is None else of) - len(shown)
    if left > 0:
        body.append(f"<tr><td colspan={len(titles)}>and {left:,} more: see {escape(see)}</td></tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def as_frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> pandas.DataFrame:
    """A data frame with one row per dict; `columns` are kept in this order, even without rows."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install 'sosie[pandas]'; rows() works without") from error
    return pandas.DataFrame(list(rows), columns=None if columns is None else list(columns))
