"""Questions about similarity, put to the zoo: nearest models and layers, the map, a pair site by site."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..zoo import Fingerprint, Zoo
from ..zoo.fingerprints import kind_of
from ..zoo.store.errors import UnknownModel
from .listing import ids_of, relatives, short_facts

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
    import json

    with zoo.store.database.reading() as connection:
        rows = connection.execute(
            "SELECT kind, labels FROM blocks JOIN files ON files.id = file WHERE model = ? ORDER BY files.id", (number,)
        ).fetchall()
    return {kind_of(row["kind"]): json.loads(row["labels"]) for row in rows if row["kind"] != "exact"}


def near(
    zoo: Zoo, query: int | Fingerprint, *, k: int, kind: str, by: str, site: str | None = None, **filters: Any
) -> dict[str, Any]:
    """The models, or layers, nearest to a model of the zoo or to a fingerprint that was sent; never itself."""
    asked = facts_of(zoo, query)["name"] if isinstance(query, int) else query
    more = k + 1 if isinstance(query, int) and by == "model" else k
    if isinstance(query, int) and by == "layer":
        more = k + len(_kinds(zoo, query).get(kind, ()))  # its own layers are among the nearest
    found = zoo.search(asked, k=more, kind=kind, by=by, site=site, **filters)
    rows = [row for row in found.rows() if row["name"] != asked][:k]
    ids = ids_of(zoo, list({row["name"] for row in rows}))
    facts = short_facts(zoo, list(ids.values()))
    picked = ("site_a", "site_b", "value", "estimated")
    answers = [
        {**facts[ids[row["name"]]], **{name: row.get(name) for name in picked}} for row in rows if row["name"] in ids
    ]
    return {"kind": kind, "what": WHAT[kind], "by": by, "rows": answers}


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
    """All models as points, near ones near each other."""
    found = zoo.map(kind)
    return {"kind": kind, "what": WHAT[kind], **placed(zoo, found.rows(), most), "stress": found.stress}


def placed(zoo: Zoo, rows: list[dict[str, Any]], most: int) -> dict[str, Any]:
    """Points with their facts; beyond `most` evenly picked ones."""
    total = len(rows)
    if total > most:
        rows = [rows[k] for k in np.linspace(0, total - 1, most).round().astype(int)]
    ids = ids_of(zoo, [row["name"] for row in rows])
    facts = short_facts(zoo, list(ids.values()))
    points = [
        {**facts[ids[row["name"]]], "x": round(float(row["x"]), 6), "y": round(float(row["y"]), 6)}
        for row in rows
        if row["name"] in ids
    ]
    return {"total": total, "points": points}
