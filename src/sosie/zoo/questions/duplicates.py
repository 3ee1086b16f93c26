"""Models that are in the zoo more than once: with the same weights, or alike at every site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...results import Array, Duplicates
from ..fingerprints import standard_deviation
from ..search.views import rows_of
from ..store import Mapped
from .similarities import mapped_of

if TYPE_CHECKING:
    from ..asking import Asking

SAME = 1 - 1e-5
BLOCK = 1024  # models that are held against all before them at a time
SURE = 6  # standard deviations that short vectors may be off


@dataclass(frozen=True, eq=False)
class _Vectors:
    short: Mapped
    exact: Mapped | None

    def lowest(self, a: int, b: int) -> tuple[float, bool]:
        """The lowest cosine of the two at a site, and whether by the whole vectors."""
        if self.exact is not None:
            whole = [rows_of(self.exact, model) for model in (a, b)]
            if all(rows is not None for rows in whole):
                return _lowest(*whole), True
        return _lowest(rows_of(self.short, a), rows_of(self.short, b)), False


def find_duplicates(zoo: Asking, threshold: float, kind: str, filters: dict[str, Any]) -> Duplicates:
    """See `Zoo.duplicates`."""
    if not 0.5 <= threshold <= 1:
        raise ValueError(f"threshold={threshold!r}: a similarity from 0.5 to 1")
    mapped = mapped_of(zoo, kind, **filters)
    vectors = _Vectors(mapped, zoo.views.exact() if kind == "cka" else None)
    facts = zoo.store.described(mapped.models.tolist(), mapped.kind)
    digests: dict[str, int] = {}
    taken: set[int] = set()  # duplicates, which nothing else is held against
    rows = []
    for model, near in _candidates(mapped, threshold):
        if (fact := facts.get(model)) is None:
            continue
        other = digests.setdefault(fact["digest"], model) if fact["digest"] != "unknown" else model
        if other != model and len(facts[other]["labels"]) == len(fact["labels"]):
            value, exact = vectors.lowest(other, model)
            rows.append(_row(fact, facts[other], "same weights", value, exact))
            taken.add(model)
            continue
        for other in near:
            if other in taken or other not in facts:
                continue
            value, exact = vectors.lowest(other, model)
            if value >= threshold:
                rows.append(_row(fact, facts[other], "alike at every site", value, exact))
                taken.add(model)
                break
    asked = {
        "kind": kind, "threshold": threshold, "models": len(mapped.models), "probe": zoo.settings.probe,
        **{name: value for name, value in filters.items() if value is not None},
    }  # fmt: skip
    note = "Alike at every site: the lowest similarity over sites, in order, is at least the threshold."
    return Duplicates(asked, tuple(rows), (note,))


def _candidates(mapped: Mapped, threshold: float) -> Iterator[tuple[int, list[int]]]:
    """Each model with those before it that have as many sites and are near enough at the last one, in order."""
    last = mapped.first + mapped.count - 1
    size = mapped.rows.shape[1]
    least = threshold - SURE * standard_deviation(threshold, size) - 1e-6  # rounding of float32
    for start in range(0, len(last), BLOCK):
        stop = min(start + BLOCK, len(last))
        here = np.asarray(mapped.rows[last[start:stop]])
        near: list[list[int]] = [[] for _ in range(start, stop)]
        for other in range(0, stop, BLOCK):
            there = np.asarray(mapped.rows[last[other : other + BLOCK]])
            close = here @ there.T >= least
            close &= mapped.count[start:stop, None] == mapped.count[None, other : other + BLOCK]
            for a, b in np.argwhere(close).tolist():
                if other + b < start + a:
                    near[a].append(int(mapped.models[other + b]))
        yield from zip(mapped.models[start:stop].tolist(), near, strict=True)


def _lowest(a: Array, b: Array) -> float:
    return float((a * b).sum(1).min())


def _row(fact: dict[str, Any], other: dict[str, Any], why: str, value: float, exact: bool) -> dict[str, Any]:
    row = {"name": fact["name"], "same_as": other["name"], "why": why, "value": value, "exact": exact}
    names = ("architecture", "task", "tags", "parent")
    return row | {name: fact[name] for name in names}
