"""The nearest models and layers, by all short vectors first, then the best by the whole ones; and relatives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checks import matching, one_of, whole_number
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
CANDIDATES = 100  # rows per site that an index returns, at least
FACTS = ("architecture", "parameters", "task", "tags", "parent")
Table = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Query:
    """A fingerprint to search for, with its name, and its id if it is a model of the zoo."""

    name: str
    fingerprint: Fingerprint
    id: int | None = None

    def places(self, key: str, site: str | Sequence[str] | None) -> Whole:
        """Return the places of the named sites among those of its vectors; None names all."""
        labels = self.fingerprint.labels[key]
        if site is None:
            return np.arange(len(labels))
        wanted = [site] if isinstance(site, str) else list(site)
        if not wanted:
            raise ValueError(f"site= names no site of {self.name}; it has {', '.join(labels)}")
        names = {name for text in wanted for name in matching(labels, text, f"{self.name} has no site")}
        return np.flatnonzero([label in names for label in labels])


def as_query(zoo: Zoo, model: Any, **options: Any) -> Query:
    """Return a query; a string names a model of the zoo, else a file with a fingerprint, else specifies a model."""
    if isinstance(model, Query):
        return model
    if isinstance(model, str) and model in zoo:
        entry = zoo[model]
        return Query(model, entry.fingerprint, entry.id)
    if isinstance(model, Fingerprint):
        name, made = str(model.about.get("architecture", "a fingerprint")), model
    elif is_fingerprint_file(model):
        name, made = Path(model).stem, Fingerprint.load(model)
    else:
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        try:
            outcome = make(Task("query", model, zoo.settings, str(zoo.probe_path.absolute()), options=options))
        except ValueError:
            if isinstance(model, str) and not any(mark in model for mark in "@(:./"):
                zoo.store.id_of(model)  # its error names the nearest names
            raise
        if outcome == NO_PROBE:
            raise FileNotFoundError(PROBE_GONE.format(zoo.probe_path))
        assert isinstance(outcome, Fingerprint)
        name, made = (model if isinstance(model, str) else with_name(model, None)[1]), outcome
    zoo.settings.check_alike(name, made)
    return Query(name, made)


def check_kind(zoo: Zoo, kind: str) -> None:
    """Raise unless the zoo has vectors of a kind; the whole ones belong to "cka", and are not a kind of their own."""
    present = {kind_of(key) for key in zoo.store.kinds()} or zoo.settings.kinds
    kinds = [known for known in zoo.settings.kinds if known in present]
    if kind_of(kind) not in kinds:
        raise UnknownModel(f"no vectors of kind {kind!r} in {zoo.folder}; there are {', '.join(kinds)}")


def none_passes(zoo: Zoo, filters: Mapping[str, Any], otherwise: str) -> ValueError:
    """Return an error that says which filter excludes all models, or the other reason."""
    return ValueError(f"{zoo.folder}: {zoo.store.why_none(filters) or otherwise}")


def about(fact: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that every answer gives about a model."""
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
    # Atoms are compared at the same layer only: coefficients, so layers and their order, are part of the key.
    meets = places if kind_of(key) == "atoms" else None
    passed = zoo.store.vectors(key, **filters)
    if not len(passed.models) and any(filters.values()):
        raise none_passes(zoo, filters, f"no model that passes the filters has vectors of kind {kind!r}")
    vectors = passed if query.id is None else passed.part(passed.models != query.id)
    used: Index | None = None
    notes: tuple[str, ...] = ()
    if index is not False and meets is None and len(vectors.models):
        used, notes = _index(zoo.store.vectors(key), vectors, bool(index))
    short = np.ascontiguousarray(query.fingerprint.vectors[key][places], np.float32)
    pairs = [(vectors, short.astype(np.float64))]  # the short vectors, and the whole ones if both have them
    if exact and key == "cka" and query.fingerprint.exact is not None and (whole := zoo.store.exact()) is not None:
        pairs.append((whole, query.fingerprint.exact[places].astype(np.float64)))
    if by == "model":
        ids = vectors.models[best_models(short, vectors, rerank, meets, symmetric, used)]
        facts = zoo.store.describe(ids.tolist(), key)
        ids = np.array([model for model in ids.tolist() if model in facts], np.int64)  # others were removed meanwhile
        rows = _sorted_models(pairs, ids, meets, symmetric, k) if len(ids) else []
    else:
        near = nearest_with(used, short, vectors, rerank, meets)
        facts = zoo.store.describe(np.unique(vectors.models[vectors.owners(near[near >= 0])]).tolist(), key)
        rows = []
        for number, numbers in enumerate(near):
            rows += _sorted_rows(pairs, number, numbers[numbers >= 0], facts, k)
    answers = []
    for model, number, row, values in rows:
        fact = facts[model]
        named = {"name": fact["name"], "id": model, "site_a": sites[number], "site_b": fact["labels"][row]}
        answers.append(named | about(fact) | values)
    asked = {
        "query": query.name, "k": k, "kind": kind, "by": by, "sites": sites, "rerank": rerank,
        "exact": len(pairs) > 1, "symmetric": symmetric, "index": used is not None, "searched": len(vectors.models),
        "probe": zoo.settings.probe, **filters,
    }  # fmt: skip
    return Neighbours(asked, tuple(answers), notes)


def _index(every: Vectors, vectors: Vectors, wanted: bool) -> tuple[Index | None, tuple[str, ...]]:
    """Return the index if there is one that fits, and a note if there is one that does not.

    `every`: the vectors of all models, with those that do not pass the filters.
    """
    index = open_index(every) if every.file == vectors.file else "the zoo was compacted meanwhile"
    if isinstance(index, Index):
        return index, ()
    advice = "`zoo.index`, or `sosie zoo index`, makes"
    if wanted:
        raise ValueError(f"no index of {vectors.kind!r} to search in: {index or 'there is none'}; {advice} one")
    return None, (f"Searched without the index ({index}); {advice} it anew.",) if index else ()


# The short list again, in float64 and by the whole vectors if there are some

Pairs = Sequence[tuple[Vectors, Table]]  # the short vectors of the zoo and of the query; maybe the whole ones of both
Row = tuple[int, int, int, dict[str, Any]]  # model, site of the query, site of the model, values


def _sorted_models(pairs: Pairs, ids: Whole, meets: Whole | None, symmetric: bool, k: int) -> list[Row]:
    """Return the `k` best of some models, by the whole vectors of those that have them."""
    vectors, query = pairs[0]
    estimated = score_models(query, vectors.part(vectors.places_of(ids)[0]), meets, symmetric=symmetric)
    values, exact = estimated.copy(), np.zeros(len(ids), bool)
    if len(pairs) > 1:
        vectors, query = pairs[1]
        places, exact = vectors.places_of(ids)
        values[exact] = score_models(query, vectors.part(places[exact]), symmetric=symmetric)
    best = []
    for place in np.lexsort((ids, -values))[:k].tolist():
        vectors, query = pairs[int(exact[place])]
        rows = vectors.of_model(int(ids[place]))
        assert rows is not None
        cosines = query @ rows.T
        if meets is not None:
            cosines[meets[:, None] != np.arange(len(rows))] = -np.inf
        site, row = np.unravel_index(int(cosines.argmax()), cosines.shape)
        numbers = {"value": float(values[place]), "estimated": float(estimated[place]), "exact": bool(exact[place])}
        best.append((int(ids[place]), int(site), int(row), numbers | {"best": float(cosines[site, row])}))
    return best


def _sorted_rows(pairs: Pairs, site: int, rows: Whole, facts: Mapping[int, Any], k: int) -> list[Row]:
    """Return the `k` best of some rows for one site of the query, by the whole vectors of those that have them."""
    vectors, query = pairs[0]
    owners = vectors.owners(rows)
    present = np.array([model in facts for model in vectors.models[owners].tolist()], bool)  # others were removed
    rows, owners = rows[present], owners[present]
    ids, sites = vectors.models[owners], rows - vectors.first[owners]
    estimated = _row_products(vectors, rows, query[site])
    values, exact = estimated.copy(), np.zeros(len(rows), bool)
    if len(pairs) > 1:
        vectors, query = pairs[1]
        places, exact = vectors.places_of(ids)
        values[exact] = _row_products(vectors, vectors.first[places[exact]] + sites[exact], query[site])
    best = []
    for place in np.lexsort((ids, -values))[:k].tolist():
        numbers = {"value": float(values[place]), "estimated": float(estimated[place]), "exact": bool(exact[place])}
        best.append((int(ids[place]), site, int(sites[place]), numbers))
    return best


def _row_products(vectors: Vectors, rows: Whole, vector: Table) -> Table:
    vectors.verify(vectors.owners(rows))
    return np.asarray(np.asarray(vectors.rows)[rows].astype(np.float64) @ vector)


# Products of a few vectors with all rows of a file, one block at a time

BLOCK = 4096  # rows at a time: 4 MiB at 256 numbers, so memory does not grow with the zoo
CACHED = 2**17  # float64 numbers at a time: they fit into a processor's cache
WORTH = 8  # a copy of a row costs as much as its product, a view nothing: a view may be an eighth of a block
STACK = 32  # rows of one small product, which BLAS multiplies without copying them first: half of the time


def best_models(
    query: Floats, vectors: Vectors, count: int, meets: Whole | None, symmetric: bool, index: Index | None
) -> Whole:
    """Return the places of the `count` models with the largest scores, best first; an index names the candidates."""
    places = np.arange(len(vectors.models))
    if index is not None:
        named = np.concatenate(index.candidates(query, vectors, max(CANDIDATES, 2 * count)))
        later = places[np.searchsorted(vectors.first, index.rows) :]
        places = np.union1d(vectors.owners(named), later)
    scores = score_models(query, vectors if index is None else vectors.part(places), meets, symmetric=symmetric)
    best = np.argpartition(-scores, count - 1)[:count] if count < len(scores) else np.arange(len(scores))
    best = best[~np.isneginf(scores[best])]
    return np.asarray(places[best[np.lexsort((best, -scores[best]))]])


def nearest_with(index: Index | None, query: Floats, vectors: Vectors, count: int, meets: Whole | None) -> Whole:
    """Return the rows with the largest cosines for each vector of the query, (sites, count), −1 if there are fewer.

    With an index, only the rows that it names and those that it does not have yet are compared.
    """
    if index is None:
        return nearest_rows(query, vectors, count, meets)[0]
    named = index.candidates(query, vectors, max(CANDIDATES, 2 * count))
    later = vectors.part(slice(int(np.searchsorted(vectors.first, index.rows)), None))
    rows, values = nearest_rows(query, later, count)
    nearest = np.full((len(query), count), -1, np.int64)
    for k, candidates in enumerate(named):
        vectors.verify(vectors.owners(candidates))
        cosines = vectors.rows[candidates] @ query[k]
        best, _ = _merge(rows[k : k + 1], values[k : k + 1], candidates[None], cosines[None], count)
        nearest[k, : best.shape[1]] = best[0]
    return nearest


def blocks(vectors: Vectors, most: int = BLOCK) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Yield the places of whole models, about `most` rows at a time, and these rows, as a view if possible."""
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
    """Return for each model the mean over the query's sites of the best cosine with a site of the model.

    It has the precision of the query. `symmetric`: averaged with the opposite direction. `meets`: each vector of the
    query is only compared with the one at this place in the model, so both directions are the same; −inf without one.
    """
    all_scores = np.empty(len(vectors.models), query.dtype)
    turned = np.ascontiguousarray(query.T)
    single = query.dtype == np.float32
    for start, stop, rows in blocks(vectors, BLOCK if single else max(1, CACHED // query.shape[1])):
        counts = vectors.count[start:stop]
        starts = np.cumsum(counts) - counts
        cosines = _products(rows, turned) if single else rows.astype(np.float64) @ turned  # (rows, sites of the query)
        if meets is not None:
            present = meets[None] < counts[:, None]
            picked = cosines[np.where(present, starts[:, None] + meets[None], 0), np.arange(len(meets))[None]]
            with np.errstate(invalid="ignore"):
                scores = np.where(present, picked, 0).sum(1) / present.sum(1)
            all_scores[start:stop] = np.where(present.any(1), scores, -np.inf)
            continue
        if (counts == counts[0]).all():  # much faster if all have equally many
            apart = cosines.reshape(len(counts), int(counts[0]), -1)
            best = apart[:, 0].copy()
            for k in range(1, apart.shape[1]):
                np.maximum(best, apart[:, k], out=best)
        else:
            best = np.maximum.reduceat(cosines, starts, axis=0)
        scores = best.mean(1)
        if symmetric:
            scores = (scores + np.add.reduceat(cosines.max(1), starts) / counts) / 2
        all_scores[start:stop] = scores
    return all_scores


def _products(rows: Floats, turned: Floats) -> Floats:
    """Return rows @ turned, for a few columns."""
    products = np.empty((len(rows), turned.shape[1]), np.float32)
    even = len(rows) - len(rows) % STACK
    shape = even // STACK, STACK, -1
    if even:
        np.matmul(rows[:even].reshape(shape), turned, out=products[:even].reshape(shape))
    np.matmul(rows[even:], turned, out=products[even:])
    return products


def nearest_rows(query: Floats, vectors: Vectors, k: int, meets: Whole | None = None) -> tuple[Whole, Floats]:
    """Return the row numbers and cosines of the `k` nearest rows for each vector of the query, (sites, k), best first.

    There may be fewer columns; where `meets` leaves fewer, the cosine is −inf and the row −1.
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
        if values.shape[1] == k:  # most blocks have few rows that are near enough
            near = np.flatnonzero((cosines > values[:, -1:]).any(0))
            numbers, cosines = numbers[near], cosines[:, near]
        rows, values = _merge(rows, values, np.broadcast_to(numbers, cosines.shape), cosines, k)
    return np.where(np.isneginf(values), -1, rows), values


def _merge(rows: Whole, values: Floats, more: Whole, cosines: Floats, k: int) -> tuple[Whole, Floats]:
    """Return the `k` largest of both, largest first."""
    rows, values = np.concatenate([rows, more], 1), np.concatenate([values, cosines], 1)
    if values.shape[1] > k:
        best = np.argpartition(-values, k - 1, axis=1)[:, :k]
        rows, values = np.take_along_axis(rows, best, 1), np.take_along_axis(values, best, 1)
    order = np.lexsort((rows, -values), axis=1)
    return np.take_along_axis(rows, order, 1), np.take_along_axis(values, order, 1)


# Where a model comes from: the models most like it layer by layer, and the recorded relatives

RELATIVES = 50  # of each kind, compared layer by layer
EARLY = 3  # the early layers are the first third


def find_family(zoo: Zoo, model: Any, k: int, options: dict[str, Any]) -> Family:
    """See `Zoo.family`."""
    whole_number(k, "k", least=1)
    query = as_query(zoo, model, **options)
    parent = None if query.id is None else zoo[query.name].parent
    recorded: dict[str, str] = {}  # relations recorded when models were added, by name
    if query.id is not None:
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
    rows = [row for candidate in candidates.values() if (row := _compare(zoo, query, candidate)) is not None]
    scores = [row["score"] for row in rows]
    for row in rows:
        row["above"] = row["score"] - median(scores) if len(scores) > 2 else None
        row["recorded"] = recorded.get(row["name"])
    rows.sort(key=lambda row: (-row["score"], row["id"]))
    kept = [row for place, row in enumerate(rows) if place < k or row["recorded"]]
    probe = zoo.settings.probe
    asked = {"query": query.name, "k": k, "recorded_parent": parent, "candidates": len(rows), "probe": probe}
    notes = (
        "score: the mean over the kinds that both have of the mean similarity at layers of the same name; "
        + ("above: how far above the median of all candidates; " if len(scores) > 2 else "")
        + "early: cka at the first third of the layers.",
        "Similarity does not say which of two came first.",
    )
    return Family(asked, tuple(kept), notes)


def _compare(zoo: Zoo, query: Query, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the similarity of each kind at layers of the same name; None if no layers share a name."""
    values: dict[str, float | None] = dict.fromkeys(("cka", "weights", "atoms"))
    early = None
    for key, labels in query.fingerprint.labels.items():
        if key not in zoo.store.kinds():
            continue
        facts = zoo.store.describe([row["id"]], key).get(row["id"])
        sites = facts["labels"] if facts else []
        shared = [(a, sites.index(site)) for a, site in enumerate(labels) if site in sites]
        if not shared:
            continue
        cosines = _cosines(zoo, query, key, row["id"], np.array(shared))
        if cosines is None:
            return None
        values[kind_of(key)] = float(cosines.mean())
        if key == "cka":
            early = float(cosines[: -(-len(shared) // EARLY)].mean())
    known = [value for value in values.values() if value is not None]
    if not known:
        return None
    compared = {"name": row["name"], "id": row["id"], "recorded": None, "score": float(np.mean(known)), "above": None}
    return compared | {"early": early, **values} | about(row)


def _cosines(zoo: Zoo, query: Query, key: str, model: int, shared: Any) -> Array | None:
    """Return the cosine at each shared site, of the whole vectors if both have them; None: the model was removed."""
    a, exact = query.fingerprint.vectors[key], query.fingerprint.exact
    b = None
    if key == "cka" and exact is not None and (whole := zoo.store.exact()) is not None:
        b = whole.of_model(model)
        a = exact if b is not None else a
    if b is None:
        b = zoo.store.vectors(key).of_model(model)
    return None if b is None else np.asarray((a[shared[:, 0]].astype(np.float64) * b[shared[:, 1]]).sum(1))
