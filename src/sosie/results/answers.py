"""Answers of a zoo: rows of one form, and what must be known to read them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from ..files import check_schema
from .storage import Result
from .tables import MOST_SHOWN, Rows, as_frame, cell, counted, html_table

if TYPE_CHECKING:
    import pandas


ROUNDING = 1e-6


@dataclass(frozen=True)
class Answer(Rows, Result):
    """Rows, a dict each; `asked` is the question and `notes` are what must be known to read them."""

    format = "sosie-answer"
    question: ClassVar[str] = "answer"
    shown: ClassVar[tuple[str, ...]] = ()  # the columns of the table, of those that rows have
    cosines: ClassVar[tuple[str, ...]] = ()  # of the columns, those that rounding may have put past 1

    asked: dict[str, Any]
    found: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        rows = ({**row, **{name: _at_most_1(row[name]) for name in self.cosines if name in row}} for row in self.found)
        object.__setattr__(self, "found", tuple(rows))

    def to_pandas(self) -> pandas.DataFrame:
        return as_frame(self.rows(), list(self.found[0]) if self.found else self.shown)

    @property
    def models(self) -> int:
        """The number of models that the answer is about; there may be fewer rows."""
        return int(self.asked.get("models", len(self.found)))

    def sentence(self) -> str:
        """The answer in words."""
        return counted(len(self.found), "row")

    def as_json(self) -> dict[str, Any]:
        return {"question": self.question, "asked": self.asked, "rows": self.found, "notes": self.notes}

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | os.PathLike[str]) -> Answer:
        kinds = {kind.question: kind for kind in KINDS}
        check_schema(path, content, {"question": tuple(kinds), "asked": {}, "rows": [{}], "notes": [str]})
        return kinds[content["question"]](content["asked"], tuple(content["rows"]), tuple(content["notes"]))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns that are not empty, and the cells of the first rows as text."""
        there = [column for column in self.shown if any(cell(row.get(column)) for row in self.found)]
        return there, [[cell(row.get(column)) for column in there] for row in self.found[:MOST_SHOWN]]

    def __repr__(self) -> str:
        columns, cells = self.table()
        cells = [[cell if cell.isprintable() else ascii(cell) for cell in row] for row in cells]
        lines = _aligned([columns, *cells]) if cells else []
        return "\n".join([self.sentence(), *lines, *self._more(), *self.notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(text)}</p>" for text in self.notes)
        return f"<p>{escape(self.sentence())}</p>{html_table(*self.table(), of=len(self.found))}{notes}"

    def _more(self) -> list[str]:
        left = len(self.found) - MOST_SHOWN
        return [f"… and {left:,} more: see rows()"] if left > 0 else []


@dataclass(frozen=True, repr=False)
class Neighbours(Answer):
    """The models, or the layers, nearest to one; nearest first.

    `value`: what they are sorted by; `exact`: whether it was worked out from the whole vectors, so that it is the
    measure itself on the probe set, rather than estimated from the short ones; `estimated`: what those gave.
    """

    question = "neighbours"
    shown = ("name", "site_a", "site_b", "value", "estimated", "architecture", "task", "tags")
    cosines = ("value", "estimated", "best")

    @property
    def names(self) -> list[str]:
        """The models in order, each once."""
        return list(dict.fromkeys(row["name"] for row in self.found))

    def sentence(self) -> str:
        what = "layers" if self.asked.get("by") == "layer" else "models"
        query, searched = self.asked.get("query"), self.asked.get("searched", 0)
        if not self.found:
            return f"No {what} near {query} among {counted(searched, 'other model')}."
        first = self.found[0]
        where = f" at {first['site_b']}" if what == "layers" else ""
        return f"Of {counted(searched, 'model')} {first['name']}{where} is nearest to {query} ({cell(first['value'])})."


def _at_most_1(value: Any) -> Any:
    """A cosine of vectors in float32, which are not quite of length 1; one that is farther off is left to be seen."""
    return 1.0 if isinstance(value, float) and 1 < value <= 1 + ROUNDING else value


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# Answers about all models: where they lie, how they group, which are copies or relatives, which to take


@dataclass(frozen=True, repr=False)
class Map(Answer):
    """A point in the plane for each model; distances stand for √(2 − 2 similarity), as well as two numbers can."""

    question = "map"
    shown = ("name", "x", "y", "architecture", "task", "tags")

    @property
    def stress(self) -> float:
        """Kruskal's stress-1: 0 where the plane shows the distances as they are; above .2 it is a rough sketch."""
        return float(self.asked["stress"])

    def sentence(self) -> str:
        text = f"{counted(len(self.found), 'model')} in the plane by {self.asked['kind']}, stress {self.stress:.3f}"
        text += " (above 0.2: a rough sketch)" if self.stress > 0.2 else ""
        return text + (f", laid out around {self.asked['landmarks']:,} of them." if self.asked["landmarks"] else ".")


@dataclass(frozen=True, repr=False)
class Clusters(Answer):
    """The group of each model, numbered by the first member; `centre` marks the member most like its group."""

    question = "clusters"
    shown = ("cluster", "name", "centre", "similarity", "architecture", "task", "tags")
    cosines = ("similarity",)

    @property
    def groups(self) -> list[list[str]]:
        """The names of the models in each cluster."""
        members: dict[int, list[str]] = {}
        for row in self.found:
            members.setdefault(row["cluster"], []).append(row["name"])
        return [members[number] for number in sorted(members)]

    def sentence(self) -> str:
        count, silhouette = self.asked["clusters"], self.asked["silhouette"]
        how = "" if silhouette is None else f", mean silhouette {silhouette:.2f}"
        how += f", roughly, from {some:,} of them" if (some := self.asked.get("landmarks")) else ""
        return f"{counted(len(self.found), 'model')} in {counted(count, 'cluster')} by {self.asked['kind']}{how}."


@dataclass(frozen=True, repr=False)
class Duplicates(Answer):
    """Models that are in the zoo under another name already, each with the first such model."""

    question = "duplicates"
    shown = ("name", "same_as", "why", "value", "architecture")
    cosines = ("value",)

    def sentence(self) -> str:
        count = len(self.found)
        if not count:
            return f"None of {counted(self.models, 'model')} is a duplicate."
        return f"{count:,} of {counted(self.models, 'model')} {'is a duplicate' if count == 1 else 'are duplicates'}."


@dataclass(frozen=True, repr=False)
class Family(Answer):
    """Models that one may come from, or that may come from it: those most alike where they have the same layers."""

    question = "family"
    shown = ("name", "recorded", "score", "above", "early", "cka", "weights", "atoms", "architecture", "task")
    cosines = ("score", "early", "cka", "weights", "atoms")

    def sentence(self) -> str:
        query, parent = self.asked["query"], self.asked["recorded_parent"]
        said = f" Recorded as its parent: {parent}." if parent else ""
        if not self.found:
            return f"No other model has layers of {query}'s names.{said}"
        best = max(self.found, key=lambda row: row["score"])
        return f"{best['name']} is most like {query} layer by layer ({best['score']:.4f}).{said}"


@dataclass(frozen=True, repr=False)
class Recommendation(Answer):
    """Models for data, best first; then those that could not be tried, with the reason."""

    question = "recommendation"
    shown = ("name", "rank", "probe_accuracy", "mean_embedding", "log_mean_over_norm", "architecture", "task", "reason")

    @property
    def models(self) -> int:
        """The number of models that could be tried."""
        return int(self.asked["tried"])

    def sentence(self) -> str:
        tried = [row for row in self.found if row["rank"] is not None]
        if not tried:
            return "No model could be tried."
        by, first = self.asked["by"], tried[0]
        more = f"; {failed:,} could not be tried" if (failed := self.asked["failed"]) else ""
        return f"Of {counted(self.models, 'model')} {first['name']} comes first by {by} ({first[by]:.4g}){more}."


KINDS: tuple[type[Answer], ...] = (Neighbours, Map, Clusters, Duplicates, Family, Recommendation)
