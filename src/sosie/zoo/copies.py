"""Models that are in the zoo more than once: with the same weights, or alike at every site."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..results import Array, Duplicates
from .index import Floats, Whole
from .kinds import standard_deviation
from .questions import asked_of, mapped_of
from .search import about, rows_of
from .store import Mapped

if TYPE_CHECKING:
    from .zoo import Asking


# Which models may be copies of which, by the short vectors: without a look at most pairs, and none is missed

BLOCK = 512  # models that are held against those before them at a time
STRIP = 64  # of them, next to each other on the axis
MOST_OTHERS = 4096  # models that these are held against at a time
SAMPLED = 2000  # models that the axis is made from
CHECKED = 64  # candidates that are looked at site by site at a time
ROUNDING = 1e-5  # of float32, in squared distances


@dataclass(frozen=True, eq=False)
class Near:
    """Pairs of models with as many sites and a cosine of at least `least` at each, in order.

    Vectors of length 1 with a cosine of c are √(2 − 2c) apart, and on any axis no farther: models are sorted along the
    one on which they differ most, by their last site, and held only against those within that distance.
    """

    mapped: Mapped
    least: float

    def each(self, taken: Set[int]) -> Iterator[tuple[int, Whole]]:
        """Each model that is near some before it, and those; `taken`: models that are no longer of interest, which may
        become more meanwhile."""
        self.mapped.verify()
        models = self.mapped.models
        axis = self._axis()
        before = np.empty(0, np.int64)  # places of models, sorted along the axis
        along = np.empty(0)
        longest = 0.0  # squared: files of others have vectors of nearly length 1
        for start in range(0, len(models), BLOCK):
            block = np.arange(start, min(start + BLOCK, len(models)))
            here = self._last(block)
            at = (here @ axis).astype(np.float64)
            longest = max(longest, float(np.square(here).sum(1).max()))
            radius = (max(2 * longest - 2 * self.least, 0.0) + ROUNDING) ** 0.5
            a, b = self._pairs(block, here, np.stack([at - radius, at + radius]), before, along)
            inside = np.argwhere(np.tril(self._close(block, here, block, here), -1))
            a, b = np.concatenate([a, inside[:, 0]]), np.concatenate([b, block[inside[:, 1]]])
            order = np.lexsort((b, a))
            a, b = a[order], b[order]
            for k in np.unique(a).tolist():
                some = b[np.searchsorted(a, k) : np.searchsorted(a, k, side="right")]
                some = some[[int(model) not in taken for model in models[some]]]
                if len(some := self._near_everywhere(start + k, some)):
                    yield int(models[start + k]), models[some]
            left = np.array([int(model) not in taken for model in models[block]], bool)
            before, along = np.concatenate([before, block[left]]), np.concatenate([along, at[left]])
            order = np.argsort(along, kind="stable")
            before, along = before[order], along[order]

    def _pairs(self, block: Whole, here: Floats, reach: Array, before: Whole, along: Array) -> tuple[Whole, Whole]:
        """Which of the block are near which before it, by the last site: places in the block, and among all.

        `reach`: from where to where on the axis each can have others.
        """
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for strip in np.split(np.argsort(reach[0]), range(STRIP, len(block), STRIP)):
            first = int(np.searchsorted(along, reach[0, strip[0]]))
            stop = int(np.searchsorted(along, reach[1, strip[-1]], side="right"))
            for start in range(first, stop, MOST_OTHERS):
                others = before[start : min(start + MOST_OTHERS, stop)]
                a, b = np.nonzero(self._close(block[strip], here[strip], others, self._last(others)))
                found.append((strip[a], others[b]))
        return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])

    def _close(self, some: Whole, here: Floats, others: Whole, there: Floats) -> NDArray[np.bool_]:
        close: NDArray[np.bool_] = here @ there.T >= self.least
        close &= self.mapped.count[some][:, None] == self.mapped.count[others][None]
        return close

    def _near_everywhere(self, model: int, others: Whole) -> Whole:
        """Those that are near at every other site, too."""
        first, count = self.mapped.first, int(self.mapped.count[model])
        own = self.mapped.rows[first[model] : first[model] + count]
        found = [np.empty(0, np.int64)]
        for start in range(0, len(others), CHECKED):
            some = others[start : start + CHECKED]
            rows = np.asarray(self.mapped.rows[first[some][:, None] + np.arange(count)[None]])
            found.append(some[(rows * own[None]).sum(2).min(1) >= self.least])
        return np.concatenate(found)

    def _last(self, places: Whole) -> Floats:
        """The vectors of the last site."""
        return np.asarray(self.mapped.rows[self.mapped.first[places] + self.mapped.count[places] - 1])

    def _axis(self) -> Floats:
        """Of length 1: that on which models differ most."""
        models = len(self.mapped.models)
        some = self._last(np.unique(np.linspace(0, models - 1, min(models, SAMPLED)).astype(np.int64)))
        apart = some - some.mean(0)
        return np.linalg.eigh(apart.T @ apart)[1][:, -1]


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
