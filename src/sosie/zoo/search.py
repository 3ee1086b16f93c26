"""The nearest models and layers: all short vectors first, the nearest of them again by the whole ones."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..models import with_name
from ..results import Neighbours
from .database import UnknownModel
from .fingerprints import Fingerprint, kind_of
from .folder import gone
from .index import Index, Indexes, Whole, file_of, merge, nearest_rows, score_models
from .store import Mapped, Store, several, why_none
from .tasks import NoProbe, Task, is_fingerprint_file, make
from .vectors import EXACT

if TYPE_CHECKING:
    from .zoo import Asking


# What is searched for: a model of the zoo by its name, a fingerprint, or a model that is fingerprinted now


@dataclass(frozen=True, eq=False)
class Query:
    """A fingerprint with a name; `own` is its number if it is a model of the zoo."""

    name: str
    fingerprint: Fingerprint
    own: int | None = None

    def chosen(self, kind: str, site: str | Sequence[str] | None) -> Chosen:
        """Its vectors of a kind at some sites, or at all."""
        key = self.fingerprint.key(kind)
        labels = self.fingerprint.labels[key]
        places = np.array(_places(labels, site, self.name), np.int64)
        exact = self.fingerprint.exact
        return Chosen(
            key,
            tuple(labels[k] for k in places),
            places,
            np.ascontiguousarray(self.fingerprint.vectors[key][places], np.float32),
            exact[places].astype(np.float64) if key == "cka" and exact is not None else None,
        )


@dataclass(frozen=True, eq=False)
class Chosen:
    """The vectors of one kind that are searched for."""

    key: str
    sites: tuple[str, ...]
    places: NDArray[np.int64]  # of the sites among all of the query's
    vectors: NDArray[np.float32]
    exact: NDArray[np.float64] | None

    @property
    def meets(self) -> NDArray[np.int64] | None:
        """Atoms meet at the same layer only: coefficients, so layers and their order, are part of the kind's key."""
        return self.places if kind_of(self.key) == "atoms" else None


def as_query(zoo: Asking, thing: Any, **options: Any) -> Query:
    """A text is a name in the zoo, else a file with a fingerprint, else the specification of a model."""
    if isinstance(thing, Query):
        return thing
    if isinstance(thing, str) and thing in zoo:
        entry = zoo[thing]
        return Query(thing, entry.fingerprint, entry.id)
    if isinstance(thing, Fingerprint):
        name, found = str(thing.about.get("architecture", "a fingerprint")), thing
    elif is_fingerprint_file(thing):
        name, found = Path(thing).stem, Fingerprint.load(thing)
    else:
        name, found = _made(zoo, thing, options)
    zoo.settings.check_alike(name, found)
    return Query(name, found)


def _made(zoo: Asking, thing: Any, options: dict[str, Any]) -> tuple[str, Fingerprint]:
    text = os.fspath(thing) if isinstance(thing, os.PathLike) else thing
    try:
        outcome = make(Task("query", text, zoo.settings, str(zoo.probe_path.absolute()), options=options))
    except ValueError as error:
        if isinstance(text, str) and not any(mark in text for mark in "@(:./"):
            zoo.store.read(text, kinds=())  # says which names are near
        raise error
    if isinstance(outcome, NoProbe):
        raise gone(zoo.probe_path)
    assert isinstance(outcome, Fingerprint)
    return (text if isinstance(text, str) else with_name(text, None)[1]), outcome


def _places(labels: Sequence[str], site: str | Sequence[str] | None, name: str) -> list[int]:
    if site is None:
        return list(range(len(labels)))
    wanted = [site] if isinstance(site, str) else list(site)
    found: list[int] = []
    for one in wanted:
        some = [k for k, label in enumerate(labels) if label == one]
        some = some or [k for k, label in enumerate(labels) if fnmatchcase(label, str(one))]
        if not some:
            raise ValueError(f"{name} has no site {one!r}; it has {', '.join(labels)}")
        found += some
    if not found:
        raise ValueError(f"no site of {name} asked for; it has {', '.join(labels)}")
    return sorted(set(found))


# The models and rows of a short list, worked out from their vectors all at once

Table = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cosines:
    """Of the rows of some models with the sites of a query, model after model; −inf where atoms do not meet."""

    values: Table  # (rows of all, sites of the query)
    starts: Whole
    counts: Whole

    @classmethod
    def of(cls, mapped: Mapped, vectors: Table, places: Whole | None = None) -> Cosines:
        """`places`: a site meets only the row at this place among the model's own."""
        starts = np.cumsum(mapped.count) - mapped.count
        values = model_products(mapped, vectors)
        if places is not None:
            own = np.arange(len(values)) - np.repeat(starts, mapped.count)
            values[own[:, None] != places[None]] = -np.inf
        return cls(values, starts, mapped.count)

    def scores(self, symmetric: bool) -> Table:
        """For each model the mean over the query's sites of the largest; `symmetric`: and the other way, averaged."""
        best = np.maximum.reduceat(self.values, self.starts, axis=0)
        met = np.isfinite(best)
        forward = np.where(met, best, 0.0).sum(1) / met.sum(1)
        if not symmetric:
            return forward
        best = self.values.max(1)
        met = np.isfinite(best)
        back = np.add.reduceat(np.where(met, best, 0.0), self.starts) / np.add.reduceat(met, self.starts, dtype=int)
        found: Table = (forward + back) / 2
        return found

    def largest(self, k: int) -> tuple[int, int, float]:
        """Site of the query and row of model `k` that are most alike, and how much."""
        start = int(self.starts[k])
        table = self.values[start : start + int(self.counts[k])].T
        site, row = np.unravel_index(int(table.argmax()), table.shape)
        return int(site), int(row), float(table[site, row])


def model_products(mapped: Mapped, vectors: Table) -> Table:
    """(rows of all models, vectors), in float64: a model at a time, which a processor's cache holds."""
    mapped.verify()
    found = np.empty((int(mapped.count.sum()), len(vectors)))
    every = np.asarray(mapped.rows)
    wide = np.empty((int(mapped.count.max()), every.shape[1]))
    start = 0
    for first, count in zip(mapped.first.tolist(), mapped.count.tolist(), strict=True):
        wide[:count] = every[first : first + count]
        np.matmul(wide[:count], vectors.T, out=found[start : start + count])
        start += count
    return found


def row_products(mapped: Mapped, rows: Whole, vector: NDArray[Any]) -> Table:
    """Of rows of the file with one vector, in float64."""
    mapped.verify(mapped.owners(rows))
    found: Table = np.asarray(mapped.rows)[rows].astype(np.float64) @ vector.astype(np.float64)
    return found


def places_of(mapped: Mapped, models: Whole) -> tuple[Whole, NDArray[np.bool_]]:
    """Where models are among those that have rows, and whether they are; numbers go up with the rows."""
    if not len(mapped.models):
        return np.zeros(len(models), np.int64), np.zeros(len(models), bool)
    places: Whole = np.minimum(np.searchsorted(mapped.models, models), len(mapped.models) - 1)
    return places, mapped.models[places] == models


# What a zoo can be asked about: kinds that it has, filters that some model passes


def check_kind(zoo: Asking, kind: str) -> None:
    """Raise unless the zoo has such vectors; the whole ones belong to "cka", and are no kind to ask for."""
    there = {kind_of(key) for key in zoo.views.kinds()} or zoo.settings.kinds
    kinds = [known for known in zoo.settings.kinds if known in there]
    if kind_of(kind) not in kinds:
        raise UnknownModel(f"no vectors of kind {kind!r} in {zoo.folder}; there are {', '.join(kinds)}")


def none_passes(zoo: Asking, filters: Mapping[str, Any], otherwise: str) -> ValueError:
    """What is wrong with filters that left no model; or what else is."""
    return ValueError(f"{zoo.folder}: {why_none(zoo.store.database, filters) or otherwise}")


# What searches keep between them, read again when the zoo has changed: where rows are, what is known of models

MOST_KEPT = 16  # views, of which one is 24 bytes a model
MOST_FACTS = 10_000  # models of which facts are kept
FACTS = ("architecture", "parameters", "task", "tags", "parent")
T = TypeVar("T")


class Views:
    """Rows by kind and filters, facts by model; safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._facts: dict[tuple[str, int], dict[str, Any]] = {}
        self._changes = -1
        self.indexes = Indexes()

    def of(self, kind: str, **filters: Any) -> Mapped:
        """As `Store.mapped` gives them."""
        filters = {name: several(value, name) for name, value in filters.items() if value is not None}
        key = kind, *filters.items()
        return self._once(key, lambda: self.store.mapped(kind, **filters))

    def exact(self) -> Mapped | None:
        """The whole vectors, if models have some."""
        return self.of(EXACT) if EXACT in self.kinds() else None

    def kinds(self) -> list[str]:
        return self._once("kinds", self.store.kinds)

    def described(self, ids: Sequence[int], kind: str) -> dict[int, dict[str, Any]]:
        """As `Store.described`; not to be changed."""
        if len(ids) > MOST_FACTS:
            return self.store.described(ids, kind)
        changes = self._looked()
        with self._lock:
            known = {model: self._facts[kind, model] for model in ids if (kind, model) in self._facts}
        if len(known) == len(ids):
            return known
        found = self.store.described([model for model in ids if model not in known], kind)
        with self._lock:
            if changes == self._changes:
                if len(self._facts) + len(found) > MOST_FACTS:
                    self._facts.clear()
                self._facts.update({(kind, model): fact for model, fact in found.items()})
        return known | found

    def _once(self, key: Hashable, read: Callable[[], T]) -> T:
        changes = self._looked()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                kept: T = self._kept[key]
                return kept
        found = read()
        with self._lock:
            if changes == self._changes:
                self._kept[key] = found
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return found

    def _looked(self) -> int:
        """How often the zoo has changed; what is of an earlier time is forgotten."""
        changes = self.store.database.changes()
        with self._lock:
            if changes != self._changes:
                self._kept.clear()
                self._facts.clear()
                self._changes = changes
        return changes


def about(fact: dict[str, Any]) -> dict[str, Any]:
    """What every answer says of a model beside its name."""
    return {name: fact[name] for name in FACTS} | {"tags": list(fact["tags"])}


def without(mapped: Mapped, model: int | None) -> Mapped:
    """All but one model."""
    if model is None:
        return mapped
    return mapped.part(mapped.models != model)


def rows_of(mapped: Mapped, model: int) -> Any:
    """The vectors of a model, in float64; None if it has none."""
    k = int(np.searchsorted(mapped.models, model))  # numbers go up with the rows
    if k == len(mapped.models) or mapped.models[k] != model:
        return None
    mapped.verify(slice(k, k + 1))
    first = int(mapped.first[k])
    return np.asarray(mapped.rows[first : first + int(mapped.count[k])], np.float64)


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
