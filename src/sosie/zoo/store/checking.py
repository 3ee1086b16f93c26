"""Is everything there that the database names? What was lost is told, and dropped on request."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...progress import track
from ...results import DamagedFile
from . import statements
from .compacting import unnamed_files
from .errors import told
from .store import Store
from .vectors import ITEM, checksum, cut_tail, placed, read_rows


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be; `lost`: models without all of their bytes."""

    what: str  # "lost", "tail", "leftover", "probe" or "database"
    text: str
    model: str | None = None
    model_id: int | None = None
    file: str | None = None
    harmless: bool = False  # what a killed writer left, which the next one overwrites


def find_problems(store: Store) -> list[Problem]:
    return [*_database(store), *_blocks(store), *_files(store)]


def mend(store: Store, problems: Sequence[Problem]) -> set[str]:
    """Drop the models that lost bytes, cut off what nobody names, unlink what nobody reads. The lock must be held.

    What kinds of problems there are no longer.
    """
    lost = [problem for problem in problems if problem.what == "lost"]
    with store.database.writing() as connection:
        for model in {problem.model_id for problem in lost if problem.model_id is not None}:
            if connection.execute("SELECT removed FROM models WHERE id = ?", (model,)).fetchone()["removed"] is None:
                statements.remove(connection, model, "lost bytes")
        _forget_missing_rows(store, connection)
    for row in _ends(store):
        path = placed(store.folder, row["name"])
        cut_tail(path, row["end"], row["width"])
    for problem in problems:
        if problem.what == "leftover" and problem.file is not None:
            placed(store.folder, problem.file).unlink(missing_ok=True)
    return {"lost", "tail", "leftover"}


def _forget_missing_rows(store: Store, connection: sqlite3.Connection) -> None:
    """Blocks past the end of their file: no reader can have mapped them, and the next add is to write there."""
    for file in connection.execute("SELECT id, width, name FROM files").fetchall():
        path = placed(store.folder, file["name"])
        whole = (path.stat().st_size if path.exists() else 0) // (file["width"] * ITEM)
        connection.execute("DELETE FROM blocks WHERE file = ? AND first + rows > ?", (file["id"], whole))


def _database(store: Store) -> Iterator[Problem]:
    with told(store.database.path), store.database.reading() as connection:
        for row in connection.execute("PRAGMA integrity_check(20)").fetchall():
            if row[0] != "ok":
                yield Problem("database", f"{store.database.path}: {row[0]}")
        for row in connection.execute("PRAGMA foreign_key_check").fetchall():
            yield Problem("database", f"{store.database.path}: a row of {row[0]} belongs to nothing")


def _blocks(store: Store) -> Iterator[Problem]:
    """Every block of a model that is there: whole, where no other is, with the bytes that were written."""
    with store.database.reading() as connection:
        found = connection.execute(
            "SELECT models.name AS model, models.id AS id, files.id AS file, files.name AS name, width, first, rows, "
            "checksum, removed, CASE WHEN json_valid(labels) AND json_valid(about) "
            "THEN json_array_length(labels) = rows ELSE 0 END AS readable "
            "FROM blocks JOIN models ON models.id = model JOIN files ON files.id = file "
            "ORDER BY files.id, first"
        ).fetchall()
    end: dict[int, int] = {}
    for row in track(found, "checking the vectors", len(found), "blocks"):
        overlaps = row["first"] < end.get(row["file"], 0)
        end[row["file"]] = row["first"] + row["rows"]
        if row["removed"] is None and (why := _wrong(store, row, overlaps)):
            text = f"{row['model']!r}: {row['name']} {why}"
            yield Problem("lost", text, row["model"], row["id"], row["name"])


def _wrong(store: Store, row: sqlite3.Row, overlaps: bool) -> str:
    path = placed(store.folder, row["name"])
    wanted = (row["first"] + row["rows"]) * row["width"] * ITEM
    if not row["readable"]:
        return "has rows whose sites, or what is known of the model, cannot be read"
    if overlaps:
        return f"has rows of another model among its own (from row {row['first']} on)"
    try:
        if (size := path.stat().st_size) < wanted:
            return f"was cut off at byte {size:,}, its rows go up to byte {wanted:,}"
        content = read_rows(path, row["first"], row["rows"], row["width"])
    except FileNotFoundError:
        return "is gone"
    except (DamagedFile, OSError) as error:
        return f"cannot be read: {error}"
    return "" if checksum(content) == row["checksum"] else f"was changed from row {row['first']} on"


def _ends(store: Store) -> list[dict[str, Any]]:
    with store.database.reading() as connection:
        found = connection.execute(
            "SELECT name, width, coalesce((SELECT first + rows FROM blocks WHERE file = files.id ORDER BY first DESC "
            "LIMIT 1), 0) AS end FROM files"
        )
        return [dict(row) for row in found]


def _files(store: Store) -> Iterator[Problem]:
    named = _ends(store)
    for row in named:
        try:
            size = placed(store.folder, row["name"]).stat().st_size
        except FileNotFoundError:  # whose rows it had is told above
            continue
        if (extra := size - row["end"] * row["width"] * ITEM) > 0:
            text = f"{row['name']} has {extra:,} bytes at its end that belong to no model: the next add overwrites them"
            yield Problem("tail", text, file=row["name"], harmless=True)
    for name in unnamed_files(store):
        yield Problem("leftover", f"{name} belongs to nothing: the next compact removes it", file=name, harmless=True)
