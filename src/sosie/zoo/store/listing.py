"""Lists of models: pages of them, what there is to filter by, and who is related to whom by what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .database import Database
from .errors import parsed
from .filters import several, where

MOST_CHOICES = 200  # of tags, architectures and tasks each
MOST_RELATED = 100
MOST_NAMED = 8  # of what there is to filter by, in a message
SHORT = "id, name, architecture, task, parent"
TAGS = "(SELECT json_group_array(tag) FROM (SELECT tag FROM tags WHERE model = models.id ORDER BY tag)) AS tags"
CHOICES = {
    "tags": "SELECT tag AS name, count(*) AS count FROM tags JOIN models ON models.id = tags.model "
    "WHERE removed IS NULL GROUP BY tag",
    "architectures": "SELECT architecture AS name, count(*) AS count FROM models WHERE removed IS NULL "
    "GROUP BY architecture",
    "tasks": "SELECT task AS name, count(*) AS count FROM models WHERE removed IS NULL AND task IS NOT NULL "
    "GROUP BY task",
}


def page(database: Database, limit: int, offset: int, text: str | None = None, **filters: Any) -> dict[str, Any]:
    """Some models in the order they were added, and how many there are in all; `text` is a part of a name."""
    chosen, values = where(**filters)
    if text:
        chosen += " AND models.name LIKE ? ESCAPE '\\'"
        escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        values.append(f"%{escaped}%")
    with database.reading() as connection:
        found = connection.execute(
            f"SELECT {SHORT}, parameters, added, {TAGS} FROM models WHERE id IN "
            f"(SELECT id FROM models WHERE {chosen} ORDER BY id LIMIT ? OFFSET ?) ORDER BY id",
            (*values, limit, offset),
        ).fetchall()
        total = offset + len(found)
        if len(found) == limit or (offset and not found):  # else this is the last page
            total = connection.execute(f"SELECT count(*) FROM models WHERE {chosen}", values).fetchone()[0]
    return {"total": total, "offset": offset, "rows": [_facts(row) for row in found]}


def short_facts(database: Database, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Name, architecture, task, tags and parent of models by id; those that were removed are left out."""
    return {row["id"]: row for row in _listed(database, "id", ids)}


def numbers_of(database: Database, names: Sequence[str]) -> dict[str, int]:
    """The ids of models by their names; those that were removed are left out."""
    return {row["name"]: row["id"] for row in _listed(database, "name", names)}


def _listed(database: Database, column: str, wanted: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with database.reading() as connection:
        for start in range(0, len(wanted), 500):
            some = list(wanted[start : start + 500])
            rows = connection.execute(
                f"SELECT {SHORT}, {TAGS} FROM models WHERE removed IS NULL AND {column} IN "
                f"({', '.join('?' * len(some))})",
                some,
            )
            found += [_facts(row) for row in rows]
    return found


def _facts(row: Any) -> dict[str, Any]:
    found = dict(row)
    found["tags"] = [] if found["tags"] == "[]" else parsed(found["tags"])
    return found


def choices(database: Database) -> dict[str, list[dict[str, Any]]]:
    """Tags, architectures and tasks with how many models have each, the most frequent first."""
    with database.reading() as connection:
        return {
            what: [
                dict(row)
                for row in connection.execute(f"{text} ORDER BY count DESC, name LIMIT ?", (MOST_CHOICES,)).fetchall()
            ]
            for what, text in CHOICES.items()
        }


def why_none(database: Database, filters: Mapping[str, Any]) -> str | None:
    """Which filter no model passes, and what there is instead; None if some model passes them all."""
    if page(database, 1, 0, **filters)["rows"]:
        return None
    # All tags that are named have to be there, of architectures and tasks one.
    asked: list[tuple[str, Sequence[str]]] = [("tag", [tag]) for tag in several(filters.get("tag"), "tag")]
    asked += [(what, several(filters[what], what)) for what in ("architecture", "task") if filters.get(what)]
    named = [f"the {what} {' or '.join(map(repr, wanted))}" for what, wanted in asked]
    for name, (what, wanted) in zip(named, asked, strict=True):
        one: dict[str, Any] = {what: wanted}
        if not page(database, 1, 0, **one)["rows"]:
            return f"no model has {name}; {_there_are(database, what, wanted[0])}"
    return f"no model has {' and '.join(named)}"


def _there_are(database: Database, what: str, wanted: str) -> str:
    """Those like it first, then the most frequent."""
    names = [row["name"] for row in choices(database)[f"{what}s"]]
    near = get_close_matches(wanted, names, n=3)
    ordered = near + [name for name in names if name not in near]
    more = ", …" * (len(ordered) > MOST_NAMED)
    return f"there are {', '.join(ordered[:MOST_NAMED])}{more}" if ordered else f"none has a {what}"


def relatives(database: Database, model: int) -> dict[str, list[dict[str, Any]]]:
    """Whom it was fine-tuned from, who was fine-tuned from it, and who has the same weights."""
    columns = "SELECT id, name FROM models WHERE removed IS NULL AND"
    with database.reading() as connection:
        me = connection.execute("SELECT name, parent, digest FROM models WHERE id = ?", (model,)).fetchone()
        asked: dict[str, tuple[str, tuple[Any, ...]]] = {
            "parents": ("name = ?", (me["parent"],)),
            "children": ("parent = ? ORDER BY id LIMIT ?", (me["name"], MOST_RELATED)),
            "same_weights": (
                "digest = ? AND digest != 'unknown' AND id != ? ORDER BY id LIMIT ?",
                (me["digest"], model, MOST_RELATED),
            ),
        }
        return {
            what: [dict(row) for row in connection.execute(f"{columns} {text}", values).fetchall()]
            for what, (text, values) in asked.items()
        }


def sites(database: Database, model: int) -> dict[str, list[str]]:
    """The sites of each kind of vectors that a model has."""
    with database.reading() as connection:
        rows = connection.execute(
            "SELECT kind, labels FROM blocks JOIN files ON files.id = file WHERE model = ? ORDER BY files.id", (model,)
        ).fetchall()
    return {row["kind"]: parsed(row["labels"]) for row in rows}
