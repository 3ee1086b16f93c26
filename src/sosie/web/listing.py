"""Lists of models: pages of them, and what there is to filter by."""

from __future__ import annotations

import json
from typing import Any

from ..zoo import Zoo
from ..zoo.store.filters import where

MOST_CHOICES = 200  # of tags, architectures and tasks each


def condition(text: str | None = None, **filters: Any) -> tuple[str, list[Any]]:
    """As SQL; `text` is a part of a name, in any case."""
    found, values = where(**filters)
    if text:
        found += " AND models.name LIKE ? ESCAPE '\\'"
        escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        values.append(f"%{escaped}%")
    return found, values


def page(zoo: Zoo, limit: int, offset: int, **filters: Any) -> dict[str, Any]:
    """Some models in the order they were added, and how many there are in all."""
    chosen, values = condition(**filters)
    with zoo.store.database.reading() as connection:
        total = connection.execute(f"SELECT count(*) FROM models WHERE {chosen}", values).fetchone()[0]
        found = connection.execute(
            "SELECT id, name, architecture, parameters, task, parent, added, (SELECT json_group_array(tag) FROM "
            "(SELECT tag FROM tags WHERE model = models.id ORDER BY tag)) AS tags "
            f"FROM models WHERE {chosen} ORDER BY id LIMIT ? OFFSET ?",
            (*values, limit, offset),
        ).fetchall()
    return {"total": total, "offset": offset, "rows": [{**dict(row), "tags": json.loads(row["tags"])} for row in found]}


def short_facts(zoo: Zoo, ids: list[int]) -> dict[int, dict[str, Any]]:
    """Name, architecture, task, tags and parent of models by id; those that were removed are left out."""
    found: dict[int, dict[str, Any]] = {}
    with zoo.store.database.reading() as connection:
        for start in range(0, len(ids), 500):
            some = ids[start : start + 500]
            rows = connection.execute(
                "SELECT id, name, architecture, task, parent, (SELECT json_group_array(tag) FROM (SELECT tag FROM tags "
                "WHERE model = models.id ORDER BY tag)) AS tags FROM models "
                f"WHERE removed IS NULL AND id IN ({', '.join('?' * len(some))})",
                some,
            )
            found |= {row["id"]: {**dict(row), "tags": json.loads(row["tags"])} for row in rows}
    return found


def choices(zoo: Zoo) -> dict[str, Any]:
    """Tags, architectures and tasks with how many models have each, the most frequent first."""
    counted = {
        "tags": "SELECT tag AS name, count(*) AS count FROM tags JOIN models ON models.id = tags.model "
        "WHERE removed IS NULL GROUP BY tag",
        "architectures": "SELECT architecture AS name, count(*) AS count FROM models WHERE removed IS NULL "
        "GROUP BY architecture",
        "tasks": "SELECT task AS name, count(*) AS count FROM models WHERE removed IS NULL AND task IS NOT NULL "
        "GROUP BY task",
    }
    with zoo.store.database.reading() as connection:
        return {
            what: [
                dict(row)
                for row in connection.execute(f"{text} ORDER BY count DESC, name LIMIT ?", (MOST_CHOICES,)).fetchall()
            ]
            for what, text in counted.items()
        }


def relatives(zoo: Zoo, model: int) -> dict[str, Any]:
    """Whom it was fine-tuned from, who was fine-tuned from it, and who has the same weights."""
    columns = "SELECT id, name FROM models WHERE removed IS NULL AND"
    with zoo.store.database.reading() as connection:
        me = connection.execute("SELECT name, parent, digest FROM models WHERE id = ?", (model,)).fetchone()
        asked = {
            "parents": ("name = ?", (me["parent"],)),
            "children": ("parent = ? ORDER BY id LIMIT 100", (me["name"],)),
            "same_weights": ("digest = ? AND id != ? ORDER BY id LIMIT 100", (me["digest"], model)),
        }
        found = {
            what: [dict(row) for row in connection.execute(f"{columns} {text}", values).fetchall()]
            for what, (text, values) in asked.items()
        }
    return found
