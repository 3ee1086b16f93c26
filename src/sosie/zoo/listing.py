"""Models of a zoo as a table: what the database says of them, without torch, so that a list is there at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks import whole_number
from ..results.tables import MOST_SHOWN, Rows, as_frame, cell, html_table
from .store import Store, notes_of

if TYPE_CHECKING:
    import pandas

COLUMNS = (
    *("name", "architecture", "parameters", "task", "tags", "sites", "kinds", "parent", "source", "added", "digest"),
    "notes",
)
SHOWN = ("name", "architecture", "parameters", "task", "tags", "sites", "parent")  # where there is less room


@dataclass(frozen=True)
class Listing(Rows):
    """Rows with the same columns, a dict each."""

    columns: tuple[str, ...]
    found: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Listing:
        return cls(tuple(columns), tuple({column: row[column] for column in columns} for row in rows))

    def to_pandas(self) -> pandas.DataFrame:
        return as_frame(self.rows(), self.columns)

    def __repr__(self) -> str:
        names = [str(row.get("name", "")) for row in self.found[:4]]
        more = ", …" * (len(self.found) > len(names))
        return f"<Listing of {len(self.found)}: {', '.join(names)}{more}>"

    def _repr_html_(self) -> str:
        return self.html(self.columns, len(self.found))

    def html(self, columns: Sequence[str], of: int, see: str = "rows()") -> str:
        """Some columns of the first rows as a table; `of`: the number of all."""
        rows = [[cell(row.get(column)) for column in columns] for row in self.found[:MOST_SHOWN]]
        return html_table(columns, rows, of=of, see=see)


def models(store: Store, filters: Mapping[str, Sequence[str]], limit: int | None = None, offset: int = 0) -> Listing:
    """Models in the order they were added, those that pass the filters of `check_filters`."""
    if limit is not None:
        limit = min(whole_number(limit, "limit", least=0), 2**62)  # the largest number of SQL
    offset = min(whole_number(offset, "offset", least=0), 2**62)
    rows = store.rows(limit, offset, **filters)
    for row in rows:
        row["sites"] = row["kinds"].get("cka") or max(row["kinds"].values(), default=0)
        row["kinds"] = [kind for kind in row["kinds"] if kind != "exact"]
        row["notes"] = notes_of(row["notes"])
    return Listing.of(rows, COLUMNS)


def failures(store: Store) -> Listing:
    """Models that could not be fingerprinted."""
    return Listing.of(store.failures(), ("name", "reason", "source", "at"))
