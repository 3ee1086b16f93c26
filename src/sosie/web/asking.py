"""Questions about similarity, put to the zoo: nearest models and layers, the map, a pair site by site."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..zoo import Fingerprint, Zoo
from ..zoo.fingerprints import kind_of
from ..zoo.search import Query
from ..zoo.store.errors import UnknownModel
from .listing import relatives, short_facts

FACTS = ("id", "name", "architecture", "task", "tags", "parent")
WHAT = {"cka": "debiased CKA", "weights": "wCKA", "atoms": "atom cosine"}


def facts_of(zoo: Zoo, model: int) -> dict[str, Any]:
    """Of a model that is in the zoo now."""
    found = short_facts(zoo, [model]).get(model)
    if found is None:
        raise UnknownModel(f"no model number {model} in this zoo: it was removed, or never there")
    return found


def model(zoo: Zoo, number: int) -> dict[str, Any]:
    """All that is known of a model, but for its vectors."""
    facts_of(zoo, number)
    stored = zoo.store.read(number, kinds=())
    about = stored.about["about"]
    return {
        "id": number,
        "name": stored.name,
        "architecture": stored.architecture,
        "parameters": stored.parameters,
        "tags": list(stored.facts.tags),
        "task": stored.facts.task,
        "source": stored.facts.source,
        "parent": stored.facts.parent,
        "added": stored.added,
        "digest": stored.digest,
        "kinds": _kinds(zoo, number),
        "absent": stored.about["absent"],
        "notes": [str(note) for note in about.get("notes", ())],
        **relatives(zoo, number),
    }


def _kinds(zoo: Zoo, number: int) -> dict[str, list[str]]:
    """The sites of each kind of vectors that a model has."""
    with zoo.store.database.reading() as connection:
        rows = connection.execute(
            "SELECT kind, labels FROM blocks JOIN files ON files.id = file WHERE model = ? ORDER BY files.id", (number,)
        ).fetchall()
    return {kind_of(row["kind"]): json.loads(row["labels"]) for row in rows if row["kind"] != "exact"}


def near(
    zoo: Zoo, query: int | Fingerprint, *, k: int, kind: str, by: str, site: str | None = None, **filters: Any
) -> dict[str, Any]:
    """The models, or layers, nearest to a model of the zoo or to a fingerprint that was sent; never itself."""
    # Never a text: one that is no name in the zoo is opened as a model, which may run a file of that name.
    asked = query if isinstance(query, Fingerprint) else _as_query(zoo, query)
    found = zoo.search(asked, k=k, kind=kind, by=by, site=site, **filters)
    picked = (*FACTS, "site_a", "site_b", "value", "estimated", "exact")
    rows = [{name: row[name] for name in picked} for row in found.rows()]
    return {"kind": kind, "what": WHAT[kind], "by": by, "searched": found.asked["searched"], "rows": rows}


def _as_query(zoo: Zoo, number: int) -> Query:
    name = facts_of(zoo, number)["name"]
    return Query(name, zoo.settings.fingerprint(zoo.store.read(number)), number)


def pair(zoo: Zoo, first: int, second: int, *, kind: str, exact: bool) -> dict[str, Any]:
    """Every site of one model against every site of another."""
    sides = [facts_of(zoo, number) for number in (first, second)]
    prints = [_fingerprint(zoo, number, kind, exact) for number in (first, second)]
    values = prints[0].cosine(prints[1], kind, exact=exact)
    sites = [list(found.labels[found.key(kind)]) for found in prints]
    kinds = [_kinds(zoo, number) for number in (first, second)]
    return {
        "kind": kind,
        "what": WHAT[kind],
        "exact": exact or kind == "atoms",
        "kinds": [name for name in kinds[0] if name in kinds[1]],
        "a": {"id": first, "name": sides[0]["name"], "sites": sites[0]},
        "b": {"id": second, "name": sides[1]["name"], "sites": sites[1]},
        "value": np.round(values, 6).tolist(),
    }


def _fingerprint(zoo: Zoo, number: int, kind: str, exact: bool) -> Fingerprint:
    """With the vectors that are asked for, and no others: the whole ones are large."""
    wanted = [key for key in zoo.store.kinds() if kind_of(key) == kind or (exact and key == "exact")]
    return zoo.settings.fingerprint(zoo.store.read(number, kinds=wanted))


def map_of(zoo: Zoo, kind: str, most: int) -> dict[str, Any]:
    """All models as points, near ones near each other; beyond `most` evenly picked ones."""
    found = zoo.map(kind)
    rows = found.rows()
    if len(rows) > most:
        rows = [rows[k] for k in np.linspace(0, len(rows) - 1, most).round().astype(int)]
    points = [{name: row[name] for name in FACTS} | {"x": round(row["x"], 6), "y": round(row["y"], 6)} for row in rows]
    return {"kind": kind, "what": WHAT[kind], "total": len(found), "points": points, "stress": found.stress}


def kinds_of(zoo: Zoo) -> list[str]:
    """The kinds of vectors that models of the zoo have."""
    there = {kind_of(key) for key in zoo.store.kinds()}
    return [kind for kind in zoo.settings.kinds if kind in there]
