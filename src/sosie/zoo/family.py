"""Where a model comes from: those most like it layer by layer, and what was recorded."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..results import Array, Family
from .database import UnknownModel
from .fingerprints import NotComparable, kind_of
from .questions import asked_of, whole_number
from .search import FACTS, Query, about, as_query, rows_of, search

if TYPE_CHECKING:
    from .zoo import Asking


CANDIDATES = 50  # of each kind, that are looked at layer by layer
EARLY = 3  # the first layers are those of the first third


def find_family(zoo: Asking, model: Any, k: int, options: dict[str, Any]) -> Family:
    """See `Zoo.family`."""
    whole_number("k", k)
    query = as_query(zoo, model, **options)
    parent = None if query.own is None else zoo[query.name].parent
    recorded = _recorded(zoo, query, parent)
    found: dict[int, dict[str, Any]] = {}
    for kind in zoo.settings.kinds:
        for row in _near(zoo, query, kind):
            found.setdefault(row["id"], row)
    for name in recorded:
        if name not in {row["name"] for row in found.values()} and (facts := _facts(zoo, name)) is not None:
            found[facts["id"]] = facts
    rows = [made for row in found.values() if (made := _held_against(zoo, query, row)) is not None]
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


def _recorded(zoo: Asking, query: Query, parent: str | None) -> dict[str, str]:
    """By name what was said when models were added: parent, child, sibling; of those that are in the zoo."""
    if query.own is None:
        return {}
    related = zoo.store.related(query.name, parent)
    found = {name: "child" if of == query.name else "sibling" for name, of in related if name != query.name}
    if parent is not None and parent in zoo and parent != query.name:
        found[parent] = "parent"
    return found


def _near(zoo: Asking, query: Query, kind: str) -> list[dict[str, Any]]:
    """The models nearest by one kind; none where the query has no such vectors, or nobody else has."""
    try:
        if query.fingerprint.key(kind) not in zoo.views.kinds():
            return []
        found = search(
            zoo, query, k=CANDIDATES, kind=kind, by="model", site=None, rerank=CANDIDATES, exact=False,
            symmetric=False, filters={},
        )  # fmt: skip
    except NotComparable:
        return []
    return found.rows()


def _facts(zoo: Asking, name: str) -> dict[str, Any] | None:
    try:
        entry = zoo[name]
    except UnknownModel:  # removed meanwhile
        return None
    return {"name": name, "id": entry.id} | {fact: getattr(entry, fact) for fact in FACTS}


def _held_against(zoo: Asking, query: Query, row: dict[str, Any]) -> dict[str, Any] | None:
    """The similarity of each kind at layers of the same name; None where there are none."""
    values: dict[str, float | None] = dict.fromkeys(("cka", "weights", "atoms"))
    early = None
    for key, labels in query.fingerprint.labels.items():
        if key not in zoo.views.kinds():
            continue
        theirs = zoo.views.described([row["id"]], key).get(row["id"])
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


def _cosines(zoo: Asking, query: Query, key: str, model: int, shared: Any) -> Array | None:
    """Site by site; by the whole vectors where both have them. None: the model was removed meanwhile."""
    mine, exact = query.fingerprint.vectors[key], query.fingerprint.exact
    theirs = None
    if key == "cka" and exact is not None and (whole := zoo.views.exact()) is not None:
        theirs = rows_of(whole, model)
        mine = exact if theirs is not None else mine
    if theirs is None:
        theirs = rows_of(zoo.views.of(key), model)
    if theirs is None:
        return None
    found: Array = (mine[shared[:, 0]].astype(np.float64) * theirs[shared[:, 1]]).sum(1)
    return found
