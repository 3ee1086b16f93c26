"""The nearest models and layers: all short vectors first, the nearest of them again by the whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...results import Neighbours
from ..store import Mapped
from .index_file import file_of
from .indexed import Index
from .plain import Whole, merge, nearest_rows, score_models
from .query import Chosen, Query
from .short_list import Cosines, places_of, row_products
from .there import check_kind, none_passes
from .views import about, without

if TYPE_CHECKING:
    from ..asking import Asking

BY = ("model", "layer")
CANDIDATES = 100  # rows a site that an index is asked for, at least


@dataclass(frozen=True, eq=False)
class Search:
    """One question, as it is worked on."""

    zoo: Asking
    query: Query
    chosen: Chosen
    mapped: Mapped
    k: int
    rerank: int
    exact: Mapped | None  # the whole vectors; None where they are not asked for, or there are none
    symmetric: bool
    index: Index | None

    def nearest(self) -> NDArray[np.int64]:
        """For each site of the query the rows with the largest cosines, (sites, rerank): of all rows, or of those that
        the index names and of those it does not know yet."""
        vectors = self.chosen.vectors
        if self.index is None:
            return nearest_rows(vectors, self.mapped, self.rerank, self.chosen.meets)[0]
        named = self.index.candidates(vectors, self.mapped, max(CANDIDATES, 2 * self.rerank))
        rows, values = nearest_rows(vectors, self.unknown(self.index), self.rerank)
        found = np.full((len(vectors), self.rerank), -1, np.int64)
        for k, some in enumerate(named):
            self.mapped.verify(self.mapped.owners(some))
            cosines = self.mapped.rows[some] @ vectors[k]
            best, _ = merge(rows[k : k + 1], values[k : k + 1], some[None], cosines[None], self.rerank)
            found[k, : best.shape[1]] = best[0]
        return found

    def best_models(self) -> NDArray[np.int64]:
        """The `rerank` models with the largest scores by the short vectors, of all or of those that the index names."""
        mapped = self.mapped
        if self.index is not None:
            named = np.concatenate(self.index.candidates(self.chosen.vectors, mapped, max(CANDIDATES, 2 * self.rerank)))
            later = np.arange(np.searchsorted(mapped.first, self.index.head.rows), len(mapped.models))
            mapped = mapped.part(np.union1d(mapped.owners(named), later))
        scores = score_models(self.chosen.vectors, mapped, self.chosen.meets, symmetric=self.symmetric)
        return mapped.models[largest(scores, self.rerank)]

    def unknown(self, index: Index) -> Mapped:
        """The models that were added after the index was made."""
        return self.mapped.part(slice(int(np.searchsorted(self.mapped.first, index.head.rows)), None))


def search(
    zoo: Asking,
    query: Query,
    *,
    k: int,
    kind: str,
    by: str,
    site: str | Sequence[str] | None,
    rerank: int,
    exact: bool,
    symmetric: bool,
    filters: dict[str, Any],
    index: bool | None = None,
) -> Neighbours:
    """See `Zoo.search`."""
    for name, number in (("k", k), ("rerank", rerank)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r}: a whole number of at least 1")
    if by not in BY:
        raise ValueError(f"no search by {by!r}: there are {', '.join(BY)}")
    check_kind(zoo, kind)
    chosen = query.chosen(kind, site)
    passed = zoo.views.of(chosen.key, **filters)
    if not len(passed.models) and any(filters.values()):
        raise none_passes(zoo, filters, f"no model that passes the filters has vectors of kind {kind!r}")
    mapped = without(passed, query.own)
    whole = zoo.views.exact() if exact and chosen.exact is not None else None
    used, notes = _index(zoo, chosen, index, mapped)
    one = Search(zoo, query, chosen, mapped, k, max(k, rerank), whole, symmetric, used)
    rows = by_model(one) if by == "model" else by_layer(one)
    asked = {
        "query": query.name, "k": k, "kind": kind, "by": by, "sites": list(chosen.sites), "rerank": one.rerank,
        "exact": whole is not None, "symmetric": symmetric, "index": used is not None,
        "searched": len(mapped.models), "probe": zoo.settings.probe,
        **{name: value for name, value in filters.items() if value is not None},
    }  # fmt: skip
    return Neighbours(asked, tuple(rows), notes)


def _index(zoo: Asking, chosen: Chosen, wanted: bool | None, mapped: Mapped) -> tuple[Index | None, tuple[str, ...]]:
    """The index if there is one that fits, and what to say if there is one that does not."""
    if wanted is False or chosen.meets is not None or not len(mapped.models):
        return None, ()
    every = zoo.views.of(chosen.key)  # not only those that pass the filters
    found = zoo.views.indexes.of(every) if file_of(every) == file_of(mapped) else "the zoo was compacted meanwhile"
    if isinstance(found, Index):
        return found, ()
    if wanted:
        why = found or "there is none"
        raise ValueError(
            f"no index of {chosen.key!r} to search in: {why}; `zoo.index`, or `sosie zoo index`, makes one"
        )
    return None, (
        f"Searched without the index ({found}); `zoo.index`, or `sosie zoo index`, makes it anew.",
    ) if found else ()


def by_model(one: Search) -> list[dict[str, Any]]:
    """The short list by the short vectors, in order by the best that is known of each."""
    ids = one.best_models()
    facts = one.zoo.views.described(ids.tolist(), one.chosen.key)
    ids = np.array([model for model in ids.tolist() if model in facts], np.int64)  # others were removed meanwhile
    if not len(ids):
        return []
    part = one.mapped.part(places_of(one.mapped, ids)[0])
    short = Cosines.of(part, one.chosen.vectors.astype(np.float64), one.chosen.meets)
    estimated = short.scores(one.symmetric)
    values, exact = estimated.copy(), np.zeros(len(ids), bool)
    if one.exact is not None and one.chosen.exact is not None:
        places, exact = places_of(one.exact, ids)
        if exact.any():
            whole = Cosines.of(one.exact.part(places[exact]), one.chosen.exact)
            values[exact] = whole.scores(one.symmetric)
    found = []
    for k in np.lexsort((ids, -values))[: one.k].tolist():
        site, row, best = whole.largest(int(exact[:k].sum())) if exact[k] else short.largest(k)
        numbers = {"value": float(values[k]), "estimated": float(estimated[k]), "exact": bool(exact[k]), "best": best}
        found.append(_row(facts[int(ids[k])], one.chosen.sites[site], row) | numbers)
    return found


def by_layer(one: Search) -> list[dict[str, Any]]:
    """For each site of the query its nearest rows, in order by the best that is known of each."""
    near = one.nearest()
    owned = one.mapped.owners(near)
    facts = one.zoo.views.described(np.unique(one.mapped.models[owned[near >= 0]]).tolist(), one.chosen.key)
    found: list[dict[str, Any]] = []
    for site, (rows, of) in enumerate(zip(near, owned, strict=True)):
        there = np.array([row >= 0 and int(one.mapped.models[k]) in facts for row, k in zip(rows, of, strict=True)])
        if there.any():
            found += _site_rows(one, site, rows[there], of[there], facts)
    return found


def _site_rows(one: Search, site: int, rows: Whole, of: Whole, facts: dict[int, Any]) -> list[dict[str, Any]]:
    """`of`: where among the models the rows' owners are."""
    ids, own = one.mapped.models[of], rows - one.mapped.first[of]
    estimated = row_products(one.mapped, rows, one.chosen.vectors[site])
    values, exact = estimated.copy(), np.zeros(len(rows), bool)
    if one.exact is not None and one.chosen.exact is not None:
        places, exact = places_of(one.exact, ids)
        whole = one.exact.first[places[exact]] + own[exact]
        values[exact] = row_products(one.exact, whole, one.chosen.exact[site])
    found = []
    for k in np.lexsort((ids, -values))[: one.k].tolist():
        numbers = {"value": float(values[k]), "estimated": float(estimated[k]), "exact": bool(exact[k])}
        found.append(_row(facts[int(ids[k])], one.chosen.sites[site], int(own[k])) | numbers)
    return found


def largest(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Where the largest are, largest first, ties by place; −inf never."""
    some = np.argpartition(-scores, count - 1)[:count] if count < len(scores) else np.arange(len(scores))
    some = some[~np.isneginf(scores[some])]
    found: NDArray[np.int64] = some[np.lexsort((some, -scores[some]))]
    return found


def _row(fact: dict[str, Any], site_a: str, place: int) -> dict[str, Any]:
    """What is known of a neighbour; the numbers are added."""
    return {"name": fact["name"], "id": fact["id"], "site_a": site_a, "site_b": fact["labels"][place]} | about(fact)
