"""What a zoo answers with: small tables and reports, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..results.frames import as_frame
from ..results.tables import MOST_SHOWN, Rows, cell, counted, html_table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Listing(Rows):
    """Rows of one form, a dict each."""

    columns: tuple[str, ...]
    found: tuple[dict[str, Any], ...]

    def to_pandas(self) -> pandas.DataFrame:
        return as_frame(self.rows(), self.columns)

    def __repr__(self) -> str:
        names = [str(row.get("name", "")) for row in self.found[:4]]
        more = ", …" * (len(self.found) > len(names))
        return f"<Listing of {len(self.found)}: {', '.join(names)}{more}>"

    def _repr_html_(self) -> str:
        shown = self.found[:MOST_SHOWN]
        rows = [[cell(row.get(column)) for column in self.columns] for row in shown]
        return html_table(self.columns, rows, of=len(self.found))


@dataclass(frozen=True)
class Added:
    """What became of several models: new, there already, or failed with the reason."""

    added: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        some = [("added", self.added), ("there already", self.there)]
        found = [{"name": name, "outcome": outcome, "reason": None} for outcome, names in some for name in names]
        return found + [{"name": name, "outcome": "failed", "reason": why} for name, why in self.failed.items()]

    def __repr__(self) -> str:
        return f"<Added {len(self.added)}, there already {len(self.there)}, failed {len(self.failed)}>"


@dataclass(frozen=True)
class Report:
    """What `check` found: nothing, or problems; whether they were seen to."""

    models: int
    problems: tuple[dict[str, Any], ...]  # what, model, file, text, harmless, mended
    repaired: bool = False
    dropped: tuple[str, ...] = ()  # models that lost bytes and are no longer in the zoo

    @property
    def ok(self) -> bool:
        """No problem but what a killed writer left, which the next add overwrites."""
        return all(problem["harmless"] for problem in self.problems)

    @property
    def left(self) -> list[str]:
        """What is still amiss: all of it, or after a repair what no repair can bring back."""
        return [p["text"] for p in self.problems if not p["harmless"] and not p["mended"]]

    @property
    def lost(self) -> list[str]:
        """Models that do not have all of their bytes."""
        return list(dict.fromkeys(p["model"] for p in self.problems if p["what"] == "lost"))

    def rows(self) -> list[dict[str, Any]]:
        return [dict(problem) for problem in self.problems]

    def sentence(self) -> str:
        serious = sum(not problem["harmless"] for problem in self.problems)
        text = f"{counted(self.models, 'model')}, {counted(serious, 'problem') if serious else 'whole'}"
        if left := len(self.problems) - serious:
            text += f"; {counted(left, 'harmless leftover')} of an interrupted write"
        if self.repaired and self.problems:
            text += f"; {len(self.left):,} cannot be repaired" if self.left else "; repaired"
        return text + (f", dropped {', '.join(self.dropped)}" if self.dropped else "")

    def __repr__(self) -> str:
        return f"<Report: {self.sentence()}>"


def listing(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Listing:
    return Listing(tuple(columns), tuple({column: row[column] for column in columns} for row in rows))
