"""Models that are in the zoo more than once: with the same weights, or alike at every site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...results import Array, Duplicates
from ..fingerprints import standard_deviation
from ..search.views import about, rows_of
from ..store import Mapped
from .asked import asked_of
from .near_copies import Near
from .similarities import mapped_of

if TYPE_CHECKING:
    from ..asking import Asking

SAME = 1 - 1e-5
Found = tuple[int, int, float, bool, str]  # the model, the one before it, how alike, by the whole vectors, why
SURE = 6  # standard deviations that short vectors may be off


@dataclass(frozen=True, eq=False)
class _Vectors:
    short: Mapped
    exact: Mapped | None
    threshold: float

    def lowest(self, a: int, b: int) -> tuple[float, bool]:
        """The lowest cosine of the two at a site, and whether by the whole vectors."""
        if self.exact is not None:
            whole = [rows_of(self.exact, model) for model in (a, b)]
            if all(rows is not None for rows in whole):
                return _lowest(*whole), True
        return _lowest(rows_of(self.short, a), rows_of(self.short, b)), False

    def alike(self, near: Near) -> Iterator[tuple[int, int, float, bool]]:
        """Each model that is alike one before it that is no duplicate itself: both, the similarity, by what."""
        taken: set[int] = set()  # duplicates, which nothing else is held against
        for model, others in near.each(taken):
            for other in others.tolist():
                value, exact = self.lowest(other, model)
                if value >= self.threshold:
                    taken.add(model)
                    yield model, other, value, exact
                    break


def find_duplicates(zoo: Asking, threshold: float, kind: str, filters: dict[str, Any]) -> Duplicates:
    """See `Zoo.duplicates`."""
    if not 0.5 <= threshold <= 1:
        raise ValueError(f"a threshold of {threshold!r}: it is a similarity from 0.5 to 1")
    mapped = mapped_of(zoo, kind, **filters)
    vectors = _Vectors(mapped, zoo.views.exact() if kind == "cka" else None, threshold)
    copies = _same_weights(mapped, zoo.store.same_digests(mapped.kind, **filters))
    found: list[Found] = [
        (model, other, *vectors.lowest(other, model), "same weights") for model, other in copies.items()
    ]
    left = mapped.part(~np.isin(mapped.models, list(copies)))
    off = SURE * standard_deviation(threshold, mapped.rows.shape[1]) + 1e-6  # rounding of float32
    near = Near(left, threshold - off)
    found += [(*one, "alike at every site") for one in vectors.alike(near)]
    found.sort(key=lambda one: one[0])  # numbers go up in the order in which models were added
    facts = zoo.views.described(sorted({model for one in found for model in one[:2]}), mapped.kind)
    rows = [_row(facts, one) for one in found if facts.keys() >= {*one[:2]}]  # else one was removed meanwhile
    asked = {"kind": kind, "threshold": threshold, "models": len(mapped.models)}
    note = "Alike at every site: the lowest similarity over sites, in order, is at least the threshold."
    return Duplicates(asked_of(zoo, asked, filters), tuple(rows), (note,))


def _same_weights(mapped: Mapped, digests: list[tuple[int, str]]) -> dict[int, int]:
    """Models with the digest of one before them, and as many sites: which that is."""
    counts = dict(zip(mapped.models.tolist(), mapped.count.tolist(), strict=True))
    first: dict[str, int] = {}
    found = {}
    for model, digest in digests:
        if model in counts:  # else it came meanwhile
            other = first.setdefault(digest, model)
            if other != model and counts[other] == counts[model]:
                found[model] = other
    return found


def _lowest(a: Array, b: Array) -> float:
    return float((a * b).sum(1).min())


def _row(facts: dict[int, dict[str, Any]], one: Found) -> dict[str, Any]:
    model, other, value, exact, why = one
    row = {"name": facts[model]["name"], "same_as": facts[other]["name"], "why": why, "value": value, "exact": exact}
    return row | about(facts[model])
