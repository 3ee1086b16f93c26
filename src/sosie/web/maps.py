"""The map of all models, and where a fingerprint that was sent belongs on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..results import Map
from ..zoo import Fingerprint, NotComparable, Zoo
from ..zoo.questions import similarities
from ..zoo.questions.map import drawn, placed, squared_distances, stress_of
from ..zoo.questions.similarities import mapped_of
from ..zoo.store import Mapped
from .asking import FACTS, WHAT

MOST_POINTS = 20_000
REFERENCES = 10  # models that a place is worked out from


@dataclass(frozen=True, eq=False)
class Layout:
    """Points of a map, and those that all of them were laid out around."""

    numbers: NDArray[np.int64]  # of the models
    points: NDArray[np.float64]
    anchors: NDArray[np.int64] | None  # places among the points; None: models were removed while the map was made

    @classmethod
    def of(cls, found: Map) -> Layout:
        numbers = np.array([row["id"] for row in found.found], np.int64)
        points = np.array([(row["x"], row["y"]) for row in found.found], np.float64).reshape(-1, 2)
        models, landmarks = found.asked["models"], found.asked["landmarks"]
        anchors: NDArray[np.int64] | None = np.arange(models)
        if len(found) < models:
            anchors = None
        elif landmarks is not None:
            anchors = drawn(models, landmarks, found.asked["seed"])
        return cls(numbers, points, anchors)


class Maps:
    """The last map of each kind, as it is shown, so that what is sent is put on that one."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        self._last: dict[str, Layout] = {}

    def answer(self, kind: str) -> dict[str, Any]:
        """All models as points, near ones near each other; beyond the most evenly picked ones."""
        found = self._zoo.map(kind)
        self._last[kind] = Layout.of(found)
        rows = list(found.found)
        if len(rows) > MOST_POINTS:
            rows = [rows[k] for k in np.linspace(0, len(rows) - 1, MOST_POINTS).round().astype(int)]
        points = [
            {name: row[name] for name in FACTS} | {"x": round(row["x"], 6), "y": round(row["y"], 6)} for row in rows
        ]
        landmarks = found.asked["landmarks"]
        return {
            "kind": kind, "what": WHAT[kind], "total": len(found), "landmarks": landmarks, "points": points,
            "stress": found.stress,
        }  # fmt: skip

    def place(self, kind: str, sent: Fingerprint) -> dict[str, Any] | None:
        """Where a fingerprint lies on the map that was answered last; None where models were removed meanwhile.

        As landmark scaling places a model (de Silva and Tenenbaum 2004), from its squared distances to the models
        that the map was laid out around. That is linear in them, and gives those models their own places: so what it
        takes is the place of a few models, and how far the distances are from theirs.
        """
        layout = self._last.get(kind)
        if layout is None or layout.anchors is None:
            return None
        mapped = mapped_of(self._zoo, kind)
        mine = _mapped(sent, kind)
        if mine.kind != mapped.kind:
            raise NotComparable("its atoms have other coefficients than those of the zoo, and nothing in common")
        anchors = layout.anchors[np.isin(layout.numbers[layout.anchors], mapped.models)]
        if not len(anchors):
            return None
        some = mapped.part(np.searchsorted(mapped.models, layout.numbers[anchors]))
        points = layout.points[anchors]
        alike = similarities(some, mine)
        near = np.sort(np.argsort(-alike[0], kind="stable")[:REFERENCES])
        squared = squared_distances(alike)
        theirs = squared_distances(similarities(some, some.part(near)))
        point = points[near].mean(0) + placed(points, theirs, squared)[0]
        return {
            "x": round(float(point[0]), 6),
            "y": round(float(point[1]), 6),
            "models": len(anchors),
            "stress": stress_of(point[None], points, squared),
        }


def _mapped(sent: Fingerprint, kind: str) -> Mapped:
    """The vectors of one model, as those of a zoo."""
    key = sent.key(kind)
    vectors = np.ascontiguousarray(sent.vectors[key], np.float32)
    zero = np.zeros(1, np.int64)
    return Mapped(key, vectors, zero, zero, np.array([len(vectors)], np.int64))
