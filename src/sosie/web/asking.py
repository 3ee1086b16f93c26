"""Questions about one model or two, put to the zoo: what is known, the nearest models and layers, family, a pair."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..zoo import Fingerprint, NotComparable, Zoo
from ..zoo.fingerprints import kind_of
from ..zoo.search import Query
from ..zoo.store import EXACT
from ..zoo.store.errors import UnknownModel
from ..zoo.store.listing import numbers_of, relatives, short_facts, sites

FACTS = ("id", "name", "architecture", "task", "tags", "parent")
WHAT = {"cka": "debiased CKA", "weights": "wCKA", "atoms": "atom cosine"}
MOST_FAMILY = 100


def facts_of(zoo: Zoo, model: int) -> dict[str, Any]:
    """Of a model that is in the zoo now."""
    found = short_facts(zoo.store.database, [model]).get(model)
    if found is None:
        raise UnknownModel(f"no model number {model} in this zoo: it was removed, or never there")
    return found


def model(zoo: Zoo, number: int) -> dict[str, Any]:
    """All that is known of a model, but for its vectors."""
    database = zoo.store.database
    with database.reading():  # all of one moment, in one transaction
        facts = facts_of(zoo, number)
        stored = zoo.store.read(number, kinds=())
        related = relatives(database, number)
        kinds = _kinds(zoo, number)
    return {
        **facts,
        "parameters": stored.parameters,
        "source": stored.facts.source,
        "added": stored.added,
        "digest": stored.digest,
        "kinds": kinds,
        "absent": stored.about["absent"],
        "notes": _notes(stored.about["about"].get("notes")),
        **related,
    }


def _notes(said: Any) -> list[str]:
    """A list of texts, whatever somebody's file has there."""
    return [str(note)[:1000] for note in said[:100]] if isinstance(said, list) else []


def _kinds(zoo: Zoo, number: int) -> dict[str, list[str]]:
    return {kind_of(key): labels for key, labels in sites(zoo.store.database, number).items() if key != EXACT}


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


def family(zoo: Zoo, number: int, k: int) -> dict[str, Any]:
    """The models that it may come from, or that come from it, with what was recorded of them."""
    found = zoo.family(_as_query(zoo, number), k)
    parent = found.asked["recorded_parent"]
    known = numbers_of(zoo.store.database, [parent] if parent else [])
    picked = (*FACTS, "recorded", "score", "above", "early", "cka", "weights", "atoms")
    return {
        "parent": None if parent is None else {"name": parent, "id": known.get(parent)},
        "candidates": found.asked["candidates"],
        "total": len(found),
        "rows": [{name: row[name] for name in picked} for row in found.rows()[:MOST_FAMILY]],
        "notes": list(found.notes),
    }


def pair(zoo: Zoo, first: int, second: int, *, kind: str, exact: bool) -> dict[str, Any]:
    """Every site of one model against every site of another."""
    with zoo.store.database.reading():
        sides = [facts_of(zoo, number) for number in (first, second)]
        kinds = [_kinds(zoo, number) for number in (first, second)]
    values = _whole(zoo, first, second) if exact and kind == "cka" else _short(zoo, first, second, kind, exact)
    return {
        "kind": kind,
        "what": WHAT[kind],
        "exact": exact or kind == "atoms",
        "kinds": [name for name in kinds[0] if name in kinds[1]],
        "a": {"id": first, "name": sides[0]["name"], "sites": kinds[0][kind]},
        "b": {"id": second, "name": sides[1]["name"], "sites": kinds[1][kind]},
        "value": np.round(values, 6).tolist(),
    }


def _short(zoo: Zoo, first: int, second: int, kind: str, exact: bool) -> Any:
    keys = [key for key in zoo.store.kinds() if kind_of(key) == kind]
    prints = [zoo.settings.fingerprint(zoo.store.read(number, kinds=keys)) for number in (first, second)]
    return prints[0].cosine(prints[1], kind, exact=exact)


def _whole(zoo: Zoo, first: int, second: int) -> Any:
    """By the whole vectors, which are large: nothing else is read."""
    blocks = [zoo.store.read(number, kinds=(EXACT,)).blocks.get(EXACT) for number in (first, second)]
    found = [block.vectors.astype(np.float64) for block in blocks if block is not None]
    if len(found) < 2:
        raise NotComparable("one of the two has no whole vectors: the short ones give an estimate")
    return found[0] @ found[1].T


def kinds_of(zoo: Zoo) -> list[str]:
    """The kinds of vectors that models of the zoo have."""
    there = {kind_of(key) for key in zoo.store.kinds()}
    return [kind for kind in zoo.settings.kinds if kind in there]
