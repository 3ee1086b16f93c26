"""Where a model comes from: those most like it layer by layer, and what was recorded."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import whole_number
from ..results import Array, Family
from .fingerprints import NotComparable, kind_of
from .questions import asked_of
from .search import FACTS, Query, about, as_query, search
from .store import UnknownModel

if TYPE_CHECKING:
    from .zoo import Zoo

CANDIDATES = 50  # of each kind, that are looked at layer by layer
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
                near = search(zoo, query, k=CANDIDATES, kind=kind, exact=False, filters={})
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
    asked = {"query": query.name, "k": k, "recorded_parent": parent, "candidates": len(rows)}
    notes = (
        "score: the mean over the kinds that both have of the mean similarity at layers of the same name; "
        + ("above: how far above the median of all candidates; " if len(alike) > 2 else "")
        + "early: cka at the first third of the layers.",
        "Similarity does not say which of two came first.",
    )
    return Family(asked_of(zoo, asked), tuple(kept), notes)


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
