"""Questions about all models, put to the zoo: which belong together, which are there twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ..zoo import Zoo
from ..zoo.store.errors import UnknownModel
from ..zoo.store.listing import numbers_of, short_facts
from .asking import WHAT

MOST_HELD = 20_000  # models: among more, duplicates take longer than a reader waits
SAME, ALIKE = "same weights", "alike at every site"


def clusters(zoo: Zoo, kind: str, k: int | None, filters: dict[str, Any]) -> dict[str, Any]:
    """Groups with their centres, and the group of every model: by group, and in it the most typical first."""
    found = zoo.clusters(k, kind, **filters)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in found.found:
        groups.setdefault(row["cluster"], []).append(row)
    asked = found.asked
    return {
        "kind": kind,
        "what": WHAT[kind],
        "total": len(found),
        "silhouette": asked["silhouette"],
        "chosen": asked["chosen"],
        "groups": [_group(number, groups[number]) for number in sorted(groups)],
        "ids": [row["id"] for row in found.found],
        "clusters": [row["cluster"] for row in found.found],
        "similarities": [None if row["similarity"] is None else round(row["similarity"], 6) for row in found.found],
        "notes": list(found.notes),
    }


def _group(number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    centre = next((row for row in rows if row["centre"]), rows[0])
    alike = [row["similarity"] for row in rows if row["similarity"] is not None]
    most = Counter(row["architecture"] for row in rows).most_common(1)[0]
    return {
        "cluster": number,
        "count": len(rows),
        "centre": {"id": centre["id"], "name": centre["name"]},
        "similarity": sum(alike) / len(alike) if alike else None,
        "architecture": {"name": most[0], "count": most[1]},
    }


def members(zoo: Zoo, whole: bytes, number: int, limit: int, offset: int) -> dict[str, Any]:
    """A page of the models of one group, of an answer of `clusters`."""
    found = json.loads(whole)
    group = next((group for group in found["groups"] if group["cluster"] == number), None)
    if group is None:
        raise UnknownModel(f"no cluster {number}: there are {len(found['groups'])}, counted from 0")
    every = [
        (model, similarity)
        for model, cluster, similarity in zip(found["ids"], found["clusters"], found["similarities"], strict=True)
        if cluster == number
    ]
    some = every[offset : offset + limit]
    facts = short_facts(zoo.store.database, [model for model, _ in some])
    rows = [{**facts[model], "similarity": similarity} for model, similarity in some if model in facts]
    return {"group": group, "total": len(every), "offset": offset, "rows": rows}


def duplicates(zoo: Zoo, kind: str, threshold: float) -> dict[str, Any]:
    """Every model that is there under another name already, with the first that it is like."""
    if (count := len(zoo)) > MOST_HELD:
        raise ValueError(
            f"{count:,} models: the explorer looks for duplicates among at most {MOST_HELD:,}. `sosie zoo duplicates` "
            "looks among all"
        )
    found = zoo.duplicates(threshold, kind)
    numbers = numbers_of(
        zoo.store.database, list({row[key]: None for row in found.found for key in ("name", "same_as")})
    )
    rows = []
    for row in found.found:
        if row["name"] in numbers and row["same_as"] in numbers:
            named = {"id": numbers[row["name"]], "same_id": numbers[row["same_as"]]}
            picked = ("name", "same_as", "why", "value", "exact", "architecture", "task", "tags", "parent")
            rows.append({**named, **{name: row[name] for name in picked}})
    return {
        "kind": kind,
        "what": WHAT[kind],
        "threshold": threshold,
        "models": found.asked["models"],
        "rows": rows,
        "notes": list(found.notes),
    }


def page_of_duplicates(whole: bytes, why: str | None, limit: int, offset: int) -> dict[str, Any]:
    """Some rows of an answer of `duplicates`, of one reason or both, and how many there are of each."""
    found = json.loads(whole)
    counts = Counter(row["why"] for row in found["rows"])
    rows = [row for row in found["rows"] if why is None or row["why"] == {"weights": SAME, "alike": ALIKE}[why]]
    return {
        **found,
        "same_weights": counts[SAME],
        "alike": counts[ALIKE],
        "total": len(rows),
        "offset": offset,
        "rows": rows[offset : offset + limit],
    }
