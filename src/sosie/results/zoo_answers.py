"""What a zoo says of all its models: where they lie, how they group, which are copies or relatives, which to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .answers import Answer, Neighbours
from .tables import counted


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
        """The names in each."""
        found: dict[int, list[str]] = {}
        for row in self.found:
            found.setdefault(row["cluster"], []).append(row["name"])
        return [found[number] for number in sorted(found)]

    def sentence(self) -> str:
        count, silhouette = self.asked["clusters"], self.asked["silhouette"]
        how = "" if silhouette is None else f", mean silhouette {silhouette:.2f}"
        how += f", roughly, from {some:,} of them" if (some := self.asked.get("landmarks")) else ""
        return f"{counted(len(self.found), 'model')} in {counted(count, 'cluster')} by {self.asked['kind']}{how}."


@dataclass(frozen=True, repr=False)
class Duplicates(Answer):
    """Models that are there under another name already: each with the first that it is like."""

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
        """How many could be tried."""
        return int(self.asked["tried"])

    def sentence(self) -> str:
        tried = [row for row in self.found if row["rank"] is not None]
        if not tried:
            return "No model could be tried."
        by, first = self.asked["by"], tried[0]
        more = f"; {failed:,} could not be tried" if (failed := self.asked["failed"]) else ""
        return f"Of {counted(self.models, 'model')} {first['name']} comes first by {by} ({first[by]:.4g}){more}."


KINDS: dict[str, type[Answer]] = {
    kind.question: kind for kind in (Neighbours, Map, Clusters, Duplicates, Family, Recommendation)
}


def answer_from_json(found: dict[str, Any]) -> Answer:
    """Of whichever kind."""
    return KINDS[found["question"]].from_json(found)
