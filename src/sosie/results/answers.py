"""The answers of a zoo: rows with the same keys, and notes on how to read them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from ..files import check_schema
from .storage import Result
from .tables import MOST_SHOWN, Rows, aligned, as_frame, cell, counted, html_table

if TYPE_CHECKING:
    import pandas


ROUNDING = 1e-6


@dataclass(frozen=True)
class Answer(Rows, Result):
    """Rows, one dict each; `asked` says what was asked, and `notes` how to read the rows.

    Files name the `question` of a subclass, by which they are read again.
    """

    format = "sosie-answer"
    question: ClassVar[str] = "answer"
    words: ClassVar[str] = ""  # the question as a page asks it
    shown: ClassVar[tuple[str, ...]] = ()  # the columns of the table, if rows have them
    cosines: ClassVar[tuple[str, ...]] = ()  # columns whose values rounding may have put past 1

    asked: dict[str, Any]
    found: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        # Cosines of float32 vectors, whose lengths may round to more than 1; larger errors stay visible.
        past = [{n: 1.0 for n in self.cosines if 1 < (row.get(n) or 0) <= 1 + ROUNDING} for row in self.found]
        object.__setattr__(self, "found", tuple(row | ones for row, ones in zip(self.found, past, strict=True)))

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
        answers = {answer.question: answer for answer in Answer.__subclasses__()}
        check_schema(path, content, {"question": tuple(answers), "asked": {}, "rows": [{}], "notes": [str]})
        return answers[content["question"]](content["asked"], tuple(content["rows"]), tuple(content["notes"]))

    def _columns(self) -> tuple[str, ...]:
        return self.shown

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The columns that are not empty, and the cells of the first rows as text."""
        columns = [column for column in self._columns() if any(cell(row.get(column)) for row in self.found)]
        return columns, [[cell(row.get(column)) for column in columns] for row in self.found[:MOST_SHOWN]]

    def __repr__(self) -> str:
        columns, cells = self.table()
        cells = [[cell if cell.isprintable() else ascii(cell) for cell in row] for row in cells]
        lines = aligned([columns, *cells]) if cells else []
        if (left := len(self.found) - MOST_SHOWN) > 0:
            lines.append(f"… and {left:,} more: see rows()")
        return "\n".join([self.sentence(), *lines, *self.notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(text)}</p>" for text in self.notes)
        return f"<p>{escape(self.sentence())}</p>{html_table(*self.table(), of=len(self.found))}{notes}"


class Neighbours(Answer):
    """The models or layers nearest to a query, nearest first.

    `value`: the value they are sorted by, for models a mean over layers; `site_a`, `site_b` and `best`: the most
    similar pair of layers, and its value; `exact`: whether it is the measure itself on the probe set, from the whole
    vectors; `estimated`: the estimate from the short vectors.
    """

    question = "neighbours"
    words = "Which are nearest?"
    shown = ("name", "site_a", "site_b", "value", "estimated", "architecture", "task", "tags")
    cosines = ("value", "estimated", "best")

    @property
    def names(self) -> list[str]:
        """The models in order, each once."""
        return list(dict.fromkeys(row["name"] for row in self.found))

    def _columns(self) -> tuple[str, ...]:
        """The columns; for models without the pair of layers, whose value is not that of the row."""
        of_layers = self.asked.get("by") == "layer"
        return tuple(column for column in self.shown if of_layers or column not in ("site_a", "site_b"))

    def _meaning(self) -> str:
        """What the value of a model is, in words; "" for layers, and in files that do not say which sites."""
        sites = self.asked.get("sites")
        if self.asked.get("by") == "layer" or not sites:
            return ""
        same = self.asked.get("kind") == "atoms"
        each = "similarity with the same layer" if same else "largest similarity with a layer of the model"
        value = f"the {each}, at {sites[0]}" if len(sites) == 1 else f"the mean over {len(sites)} layers of the {each}"
        both = ", averaged with the opposite direction" if self.asked.get("symmetric") else ""
        return f" The value is {value}{both}."

    def sentence(self) -> str:
        what = "layers" if self.asked.get("by") == "layer" else "models"
        query, searched = self.asked.get("query"), self.asked.get("searched", 0)
        if not self.found:
            return f"No {what} near {query} among {counted(searched, 'other model')}."
        first = self.found[0]
        where = f" at {first['site_b']}" if what == "layers" else ""
        nearest = f"{first['name']}{where} is nearest to {query} ({cell(first['value'])})"
        return f"Of {counted(searched, 'model')} {nearest}.{self._meaning()}"


# Answers about all models: a map, clusters, duplicates, relatives, recommendations


class Map(Answer):
    """A point in the plane for each model; distances approximate √(2 − 2 similarity)."""

    question = "map"
    words = "Where do they lie?"
    shown = ("name", "x", "y", "architecture", "task", "tags")

    @property
    def stress(self) -> float:
        """Kruskal's stress-1: 0 if distances in the plane are exact; above 0.2 the map is a rough sketch."""
        return float(self.asked["stress"])

    def sentence(self) -> str:
        text = f"{counted(len(self.found), 'model')} in the plane by {self.asked['kind']}, stress {self.stress:.3f}"
        text += " (above 0.2: a rough sketch)" if self.stress > 0.2 else ""
        return text + (f", laid out around {self.asked['landmarks']:,} of them." if self.asked["landmarks"] else ".")


class Clusters(Answer):
    """The group of each model, numbered by the first member; `centre` marks the member most like its group."""

    question = "clusters"
    words = "Which belong together?"
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


class Duplicates(Answer):
    """Models that are also in the zoo under an earlier name, each with the first such model."""

    question = "duplicates"
    words = "Which are there twice?"
    shown = ("name", "same_as", "why", "value", "architecture")
    cosines = ("value",)

    def sentence(self) -> str:
        count = len(self.found)
        if not count:
            return f"None of {counted(self.models, 'model')} is a duplicate."
        return f"{count:,} of {counted(self.models, 'model')} {'is a duplicate' if count == 1 else 'are duplicates'}."


class Family(Answer):
    """Possible ancestors and descendants of a model: the models most alike at layers of the same name."""

    question = "family"
    words = "Where does it come from?"
    shown = ("name", "recorded", "score", "above", "early", "cka", "weights", "atoms", "architecture", "task")
    cosines = ("score", "early", "cka", "weights", "atoms")

    def sentence(self) -> str:
        query, parent = self.asked["query"], self.asked["recorded_parent"]
        recorded = f" Recorded as its parent: {parent}." if parent else ""
        if not self.found:
            return f"No other model has layers of {query}'s names.{recorded}"
        best = max(self.found, key=lambda row: row["score"])
        return f"{best['name']} is most like {query} layer by layer ({best['score']:.4f}).{recorded}"


class Recommendation(Answer):
    """Models for a data set, best first; then those that could not be tried, with the reason."""

    question = "recommendation"
    words = "Which model for these data?"
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
