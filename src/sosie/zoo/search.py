"""The nearest models and layers: by all short vectors first, the best again by the whole ones; and relatives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checks import one_of, whole_number
from ..models import with_name
from ..results import Array, Family, Neighbours
from .fingerprints import PROBE_GONE, Fingerprint, NotComparable, kind_of
from .index import Index, open_index
from .store import UnknownModel
from .tasks import NO_PROBE, Task, is_fingerprint_file, make
from .vectors import Floats, Vectors, Whole

if TYPE_CHECKING:
    from .zoo import Zoo

BY = ("model", "layer")
CANDIDATES = 100  # rows a site that an index is asked for, at least
FACTS = ("architecture", "parameters", "task", "tags", "parent")
Table = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Query:
    """What is searched for: a fingerprint with a name; `own` is its number if it is a model of the zoo."""

    name: str
    fingerprint: Fingerprint
    own: int | None = None

    def places(self, key: str, site: str | Sequence[str] | None) -> Whole:
        """Where the sites named are among those of its vectors, or all."""
        labels = self.fingerprint.labels[key]
        if site is None:
            return np.arange(len(labels))
        chosen: list[int] = []
        for one in [site] if isinstance(site, str) else site:
            some = [k for k, label in enumerate(labels) if label == one]
            some = some or [k for k, label in enumerate(labels) if fnmatchcase(label, str(one))]
            if not some:
                raise ValueError(f"{self.name} has no site {one!r}; it has {', '.join(labels)}")
            chosen += some
        if not chosen:
            raise ValueError(f"no site of {self.name} asked for; it has {', '.join(labels)}")
        return np.array(sorted(set(chosen)), np.int64)


def as_query(zoo: Zoo, thing: Any, **options: Any) -> Query:
    """A text is a name in the zoo, else a file with a fingerprint, else the specification of a model."""
    if isinstance(thing, Query):
        return thing
    if isinstance(thing, str) and thing in zoo:
        entry = zoo[thing]
        return Query(thing, entry.fingerprint, entry.id)
    if isinstance(thing, Fingerprint):
        name, made = str(thing.about.get("architecture", "a fingerprint")), thing
    elif is_fingerprint_file(thing):
        name, made = Path(thing).stem, Fingerprint.load(thing)
    else:
        model = os.fspath(thing) if isinstance(thing, os.PathLike) else thing
        try:
            outcome = make(Task("query", model, zoo.settings, str(zoo.probe_path.absolute()), options=options))
        except ValueError:
            if isinstance(model, str) and not any(mark in model for mark in "@(:./"):
                zoo.store.id_of(model)  # says which names are near
            raise
        if outcome == NO_PROBE:
            raise FileNotFoundError(PROBE_GONE.format(zoo.probe_path))
        assert isinstance(outcome, Fingerprint)
        name, made = (model if isinstance(model, str) else with_name(model, None)[1]), outcome
    zoo.settings.check_alike(name, made)
    return Query(name, made)


def check_kind(zoo: Zoo, kind: str) -> None:
    """Raise unless the zoo has such vectors; the whole ones belong to "cka", and are no kind to ask for."""
    there = {kind_of(key) for key in zoo.store.kinds()} or zoo.settings.kinds
    kinds = [known for known in zoo.settings.kinds if known in there]
    if kind_of(kind) not in kinds:
        raise UnknownModel(f"no vectors of kind {kind!r} in {zoo.folder}; there are {', '.join(kinds)}")


def none_passes(zoo: Zoo, filters: Mapping[str, Any], otherwise: str) -> ValueError:
    """What is wrong with filters that left no model; or what else is."""
    return ValueError(f"{zoo.folder}: {zoo.store.why_none(filters) or otherwise}")


def about(fact: Mapping[str, Any]) -> dict[str, Any]:
    """What every answer says of a model beside its name."""
    return {name: fact[name] for name in FACTS} | {"tags": list(fact["tags"])}


def search(
    zoo: Zoo,
    query: Query,
    *,
    k: int,
    kind: str = "cka",
    by: str = "model",
    site: str | Sequence[str] | None = None,
    rerank: int = 50,
    exact: bool = True,
    symmetric: bool = False,
    index: bool | None = None,
    filters: Mapping[str, Any],
) -> Neighbours:
    """See `Zoo.search`."""
    whole_number(k, "k", least=1)
    rerank = max(k, whole_number(rerank, "rerank", least=1))
    one_of(by, "by", BY)
    check_kind(zoo, kind)
    key = query.fingerprint.key(kind)
    places = query.places(key, site)
    sites = [query.fingerprint.labels[key][place] for place in places]
    # Atoms meet at the same layer only: coefficients, so layers and their order, are part of the key.
    meets = places if kind_of(key) == "atoms" else None
    passed = zoo.store.vectors(key, **filters)
    if not len(passed.models) and any(filters.values()):
        raise none_passes(zoo, filters, f"no model that passes the filters has vectors of kind {kind!r}")
    vectors = passed if query.own is None else passed.part(passed.models != query.own)
    used: Index | None = None
    notes: tuple[str, ...] = ()
    if index is not False and meets is None and len(vectors.models):
        used, notes = _index(zoo.store.vectors(key), vectors, bool(index))
    short = np.ascontiguousarray(query.fingerprint.vectors[key][places], np.float32)
    mine = [(vectors, short.astype(np.float64))]  # the short vectors, and the whole ones if they are to be had
    if exact and key == "cka" and query.fingerprint.exact is not None and (whole := zoo.store.exact()) is not None:
        mine.append((whole, query.fingerprint.exact[places].astype(np.float64)))
    if by == "model":
        ids = vectors.models[best_models(short, vectors, rerank, meets, symmetric, used)]
        facts = zoo.store.describe(ids.tolist(), key)
        ids = np.array([model for model in ids.tolist() if model in facts], np.int64)  # others were removed meanwhile
        rows = _sorted_models(mine, ids, meets, symmetric, k) if len(ids) else []
    else:
        near = nearest_with(used, short, vectors, rerank, meets)
        facts = zoo.store.describe(np.unique(vectors.models[vectors.owners(near[near >= 0])]).tolist(), key)
        rows = []
        for number, some in enumerate(near):
            rows += _sorted_rows(mine, number, some[some >= 0], facts, k)
    found = []
    for model, number, row, numbers in rows:
        fact = facts[model]
        named = {"name": fact["name"], "id": model, "site_a": sites[number], "site_b": fact["labels"][row]}
        found.append(named | about(fact) | numbers)
    asked = {
        "query": query.name, "k": k, "kind": kind, "by": by, "sites": sites, "rerank": rerank,
        "exact": len(mine) > 1, "symmetric": symmetric, "index": used is not None, "searched": len(vectors.models),
        "probe": zoo.settings.probe, **filters,
    }  # fmt: skip
    return Neighbours(asked, tuple(found), notes)


def _index(every: Vectors, vectors: Vectors, wanted: bool) -> tuple[Index | None, tuple[str, ...]]:
    """The index if there is one that fits, and what to say if there is one that does not.

    `every`: the vectors of all models, not only of those that pass the filters.
    """
    found = open_index(every) if every.file == vectors.file else "the zoo was compacted meanwhile"
    if isinstance(found, Index):
        return found, ()
    if wanted:
        why = found or "there is none"
        raise ValueError(
            f"no index of {vectors.kind!r} to search in: {why}; `zoo.index`, or `sosie zoo index`, makes one"
        )
    again = f"Searched without the index ({found}); `zoo.index`, or `sosie zoo index`, makes it anew."
    return None, (again,) if found else ()


# The short list again, in float64 and by the whole vectors where there are some

Mine = Sequence[tuple[Vectors, Table]]  # the short vectors of the zoo and of the query; maybe the whole ones of both
Row = tuple[int, int, int, dict[str, Any]]  # model, site of the query, row among the model's own, its values


def _sorted_models(mine: Mine, ids: Whole, meets: Whole | None, symmetric: bool, k: int) -> list[Row]:
    """The `k` best of some models, by the whole vectors of those that have them."""
    vectors, query = mine[0]
    estimated = score_models(query, vectors.part(vectors.places_of(ids)[0]), meets, symmetric=symmetric)
    values, exact = estimated.copy(), np.zeros(len(ids), bool)
    if len(mine) > 1:
        vectors, query = mine[1]
        places, exact = vectors.places_of(ids)
        values[exact] = score_models(query, vectors.part(places[exact]), symmetric=symmetric)
    found = []
    for place in np.lexsort((ids, -values))[:k].tolist():
        vectors, query = mine[int(exact[place])]
        rows = vectors.of_model(int(ids[place]))
        assert rows is not None
        cosines = query @ rows.T
        if meets is not None:
            cosines[meets[:, None] != np.arange(len(rows))] = -np.inf
        site, row = np.unravel_index(int(cosines.argmax()), cosines.shape)
        numbers = {"value": float(values[place]), "estimated": float(estimated[place]), "exact": bool(exact[place])}
        found.append((int(ids[place]), int(site), int(row), numbers | {"best": float(cosines[site, row])}))
    return found


def _sorted_rows(mine: Mine, site: int, rows: Whole, facts: Mapping[int, Any], k: int) -> list[Row]:
    """The `k` best of some rows for one site of the query, by the whole vectors of those that have them."""
    vectors, query = mine[0]
    owners = vectors.owners(rows)
    there = np.array([model in facts for model in vectors.models[owners].tolist()], bool)  # others were removed
    rows, owners = rows[there], owners[there]
    ids, own = vectors.models[owners], rows - vectors.first[owners]
    estimated = _row_products(vectors, rows, query[site])
    values, exact = estimated.copy(), np.zeros(len(rows), bool)
    if len(mine) > 1:
        vectors, query = mine[1]
        places, exact = vectors.places_of(ids)
        values[exact] = _row_products(vectors, vectors.first[places[exact]] + own[exact], query[site])
    found = []
    for place in np.lexsort((ids, -values))[:k].tolist():
        numbers = {"value": float(values[place]), "estimated": float(estimated[place]), "exact": bool(exact[place])}
        found.append((int(ids[place]), site, int(own[place]), numbers))
    return found


def _row_products(vectors: Vectors, rows: Whole, vector: Table) -> Table:
    vectors.verify(vectors.owners(rows))
    found: Table = np.asarray(vectors.rows)[rows].astype(np.float64) @ vector
    return found


# Products of a few vectors with all rows of a file, a block at a time

BLOCK = 4096  # rows at a time: 4 MiB at 256 numbers, so that memory does not grow with the zoo
CACHED = 2**17  # float64 numbers that are worked on at a time: a processor's cache holds them
WORTH = 8  # a view of a row costs nothing, a copy as much as a product: an eighth of a block is taken as it lies
STACK = 32  # rows of one small product, which BLAS does not copy into a layout of its own first: half of the time


def best_models(
    query: Floats, vectors: Vectors, count: int, meets: Whole | None, symmetric: bool, index: Index | None
) -> Whole:
    """Places of the `count` models with the largest scores, best first, of all or of those that the index names."""
    places = np.arange(len(vectors.models))
    if index is not None:
        named = np.concatenate(index.candidates(query, vectors, max(CANDIDATES, 2 * count)))
        later = places[np.searchsorted(vectors.first, index.rows) :]
        places = np.union1d(vectors.owners(named), later)
    scores = score_models(query, vectors if index is None else vectors.part(places), meets, symmetric=symmetric)
    some = np.argpartition(-scores, count - 1)[:count] if count < len(scores) else np.arange(len(scores))
    some = some[~np.isneginf(scores[some])]
    found: Whole = places[some[np.lexsort((some, -scores[some]))]]
    return found


def nearest_with(index: Index | None, query: Floats, vectors: Vectors, count: int, meets: Whole | None) -> Whole:
    """For each vector of the query the rows with the largest cosines, (sites, count), −1 where there are fewer: of all
    rows, or of those that the index names and of those it does not know yet."""
    if index is None:
        return nearest_rows(query, vectors, count, meets)[0]
    named = index.candidates(query, vectors, max(CANDIDATES, 2 * count))
    later = vectors.part(slice(int(np.searchsorted(vectors.first, index.rows)), None))
    rows, values = nearest_rows(query, later, count)
    found = np.full((len(query), count), -1, np.int64)
    for k, some in enumerate(named):
        vectors.verify(vectors.owners(some))
        cosines = vectors.rows[some] @ query[k]
        best, _ = _merge(rows[k : k + 1], values[k : k + 1], some[None], cosines[None], count)
        found[k, : best.shape[1]] = best[0]
    return found


def blocks(vectors: Vectors, most: int = BLOCK) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Whole models, about `most` rows at a time: from which to which model, and their rows; a view where it can be."""
    ends = np.cumsum(vectors.count)
    gaps = np.flatnonzero(vectors.first[1:] != (vectors.first + vectors.count)[:-1]) + 1  # models behind others' rows
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
        gap = int(np.searchsorted(gaps, start, side="right"))
        if gap < len(gaps) and gaps[gap] < stop and WORTH * (int(ends[gaps[gap] - 1]) - before) >= most:
            stop = int(gaps[gap])
        vectors.verify(slice(start, stop))
        first, last = int(vectors.first[start]), int(vectors.first[stop - 1] + vectors.count[stop - 1])
        if last - first == int(ends[stop - 1]) - before:
            yield start, stop, np.asarray(vectors.rows[first:last])
        else:
            yield start, stop, np.asarray(vectors.rows[vectors.part(slice(start, stop)).row_numbers()])
        start = stop


def score_models(query: Any, vectors: Vectors, meets: Whole | None = None, *, symmetric: bool = False) -> Any:
    """For each model the mean over the query's sites of the best cosine among the model's, in the query's precision.

    `symmetric`: averaged with the same the other way round. `meets`: a vector of the query meets only the one of the
    model that has this place among its own, so both ways are the same; −inf where there is none.
    """
    found = np.empty(len(vectors.models), query.dtype)
    turned = np.ascontiguousarray(query.T)
    single = query.dtype == np.float32
    for start, stop, rows in blocks(vectors, BLOCK if single else max(1, CACHED // query.shape[1])):
        counts = vectors.count[start:stop]
        starts = np.cumsum(counts) - counts
        cosines = _products(rows, turned) if single else rows.astype(np.float64) @ turned  # (rows, sites of the query)
        if meets is not None:
            there = meets[None] < counts[:, None]
            picked = cosines[np.where(there, starts[:, None] + meets[None], 0), np.arange(len(meets))[None]]
            with np.errstate(invalid="ignore"):
                scores = np.where(there, picked, 0).sum(1) / there.sum(1)
            found[start:stop] = np.where(there.any(1), scores, -np.inf)
            continue
        if (counts == counts[0]).all():  # much faster where all have as many
            apart = cosines.reshape(len(counts), int(counts[0]), -1)
            best = apart[:, 0].copy()
            for k in range(1, apart.shape[1]):
                np.maximum(best, apart[:, k], out=best)
        else:
            best = np.maximum.reduceat(cosines, starts, axis=0)
        scores = best.mean(1)
        if symmetric:
            scores = (scores + np.add.reduceat(cosines.max(1), starts) / counts) / 2
        found[start:stop] = scores
    return found


def _products(rows: Floats, turned: Floats) -> Floats:
    """rows @ turned, for a few columns."""
    found = np.empty((len(rows), turned.shape[1]), np.float32)
    even = len(rows) - len(rows) % STACK
    shape = even // STACK, STACK, -1
    if even:
        np.matmul(rows[:even].reshape(shape), turned, out=found[:even].reshape(shape))
    np.matmul(rows[even:], turned, out=found[even:])
    return found


def nearest_rows(query: Floats, vectors: Vectors, k: int, meets: Whole | None = None) -> tuple[Whole, Floats]:
    """For each vector of the query the `k` nearest rows, nearest first: (sites, k) row numbers, and cosines.

    Fewer where there are fewer; −inf, with row −1, where `meets` leaves fewer.
    """
    rows = np.empty((len(query), 0), np.int64)
    values = np.empty((len(query), 0), np.float32)
    turned = np.ascontiguousarray(query.T)
    for start, stop, some in blocks(vectors):
        part = vectors.part(slice(start, stop))
        numbers = part.row_numbers()
        cosines = np.ascontiguousarray(_products(some, turned).T)
        if meets is not None:
            place = numbers - np.repeat(part.first, part.count)
            cosines[meets[:, None] != place[None]] = -np.inf
        if values.shape[1] == k:  # most blocks have few that are near enough
            near = np.flatnonzero((cosines > values[:, -1:]).any(0))
            numbers, cosines = numbers[near], cosines[:, near]
        rows, values = _merge(rows, values, np.broadcast_to(numbers, cosines.shape), cosines, k)
    return np.where(np.isneginf(values), -1, rows), values


def _merge(rows: Whole, values: Floats, more: Whole, cosines: Floats, k: int) -> tuple[Whole, Floats]:
    """The `k` largest of both, largest first."""
    rows, values = np.concatenate([rows, more], 1), np.concatenate([values, cosines], 1)
    if values.shape[1] > k:
        best = np.argpartition(-values, k - 1, axis=1)[:, :k]
        rows, values = np.take_along_axis(rows, best, 1), np.take_along_axis(values, best, 1)
    order = np.lexsort((rows, -values), axis=1)
    return np.take_along_axis(rows, order, 1), np.take_along_axis(values, order, 1)


# Where a model comes from: those most like it layer by layer, and what was recorded

RELATIVES = 50  # of each kind, that are looked at layer by layer
EARLY = 3  # the first layers are those of the first third


def find_family(zoo: Zoo, model: Any, k: int, options: dict[str, Any]) -> Family:
    """See `Zoo.family`."""
    whole_number(k, "k", least=1)
    query = as_query(zoo, model, **options)
    parent = None if query.own is None else zoo[query.name].parent
    recorded: dict[str, str] = {}  # what was said when models were added, by name
    if query.own is not None:
        children = [pair for pair in zoo.store.related(query.name, parent) if pair[0] != query.name]
        recorded = {name: "child" if of == query.name else "sibling" for name, of in children}
        if parent is not None and parent in zoo and parent != query.name:
            recorded[parent] = "parent"
    candidates: dict[int, dict[str, Any]] = {}
    for kind in zoo.settings.kinds:
        try:
            if query.fingerprint.key(kind) in zoo.store.kinds():
                near = search(zoo, query, k=RELATIVES, kind=kind, exact=False, filters={})
                candidates = {row["id"]: row for row in near.rows()} | candidates
        except NotComparable:  # the query has no such vectors
            continue
    for name in {*recorded} - {row["name"] for row in candidates.values()}:
        try:
            entry = zoo[name]
        except UnknownModel:  # removed meanwhile
            continue
        candidates[entry.id] = {"name": name, "id": entry.id} | {fact: getattr(entry, fact) for fact in FACTS}
    rows = [row for each in candidates.values() if (row := _compare(zoo, query, each)) is not None]
    alike = [row["score"] for row in rows]
    for row in rows:
        row["above"] = row["score"] - median(alike) if len(alike) > 2 else None
        row["recorded"] = recorded.get(row["name"])
    rows.sort(key=lambda row: (-row["score"], row["id"]))
    kept = [row for place, row in enumerate(rows) if place < k or row["recorded"]]
    probe = zoo.settings.probe
    asked = {"query": query.name, "k": k, "recorded_parent": parent, "candidates": len(rows), "probe": probe}
    notes = (
        "score: the mean over the kinds that both have of the mean similarity at layers of the same name; "
        + ("above: how far above the median of all candidates; " if len(alike) > 2 else "")
        + "early: cka at the first third of the layers.",
        "Similarity does not say which of two came first.",
    )
    return Family(asked, tuple(kept), notes)


def _compare(zoo: Zoo, query: Query, row: dict[str, Any]) -> dict[str, Any] | None:
    """The similarity of each kind at layers of the same name; None where there are none."""
    values: dict[str, float | None] = dict.fromkeys(("cka", "weights", "atoms"))
    early = None
    for key, labels in query.fingerprint.labels.items():
        if key not in zoo.store.kinds():
            continue
        theirs = zoo.store.describe([row["id"]], key).get(row["id"])
        sites = theirs["labels"] if theirs else []
        shared = [(a, sites.index(site)) for a, site in enumerate(labels) if site in sites]
        if not shared:
            continue
        cosines = _cosines(zoo, query, key, row["id"], np.array(shared))
        if cosines is None:
            return None
        values[kind_of(key)] = float(cosines.mean())
        if key == "cka":
            early = float(cosines[: -(-len(shared) // EARLY)].mean())
    there = [value for value in values.values() if value is not None]
    if not there:
        return None
    made = {"name": row["name"], "id": row["id"], "recorded": None, "score": float(np.mean(there)), "above": None}
    return made | {"early": early, **values} | about(row)


def _cosines(zoo: Zoo, query: Query, key: str, model: int, shared: Any) -> Array | None:
    """Site by site; by the whole vectors where both have them. None: the model was removed meanwhile."""
    mine, exact = query.fingerprint.vectors[key], query.fingerprint.exact
    theirs = None
    if key == "cka" and exact is not None and (whole := zoo.store.exact()) is not None:
        theirs = whole.of_model(model)
        mine = exact if theirs is not None else mine
    if theirs is None:
        theirs = zoo.store.vectors(key).of_model(model)
    if theirs is None:
        return None
    cosines: Array = (mine[shared[:, 0]].astype(np.float64) * theirs[shared[:, 1]]).sum(1)
    return cosines
