"""Is everything there that the database names? What was lost is told, and dropped on request."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import DamagedFile
from ..progress import track
from .database import NO_ROOM, REPAIR, told
from .store import Store, remove
from .vectors import (
    ITEM,
    checksum,
    cut_tail,
    file_name,
    generation_of,
    no_room,
    placed,
    read_rows,
    sync_folder,
    write_all,
)

# Vectors without those of removed models: new files beside the old, then one transaction that turns to them


def compact(store: Store) -> int:
    """Give back the room of removed models; how many bytes that was. Readers keep what they have mapped."""
    with store.writer():
        with store.database.reading() as connection:
            files = connection.execute("SELECT id, kind, width, name FROM files").fetchall()
        for name in unnamed_files(store):  # of one that was killed
            placed(store.folder, name).unlink(missing_ok=True)
        before = _bytes(store)
        made: list[Path] = []
        places: list[tuple[int, int, int]] = []  # first row, file, model
        names: list[tuple[str, int]] = []
        try:
            for file in files:
                new = file_name(file["kind"], file["width"], generation_of(file["name"]) + 1)
                made.append(placed(store.folder, new))
                places += _rewrite(store, file, made[-1])
                names.append((new, file["id"]))
            _turn(store, places, names)
        except BaseException as error:
            if not _names_any(store, names):
                for path in made:
                    path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise no_room(made[-1]) from error
            raise
        for file in files:
            with contextlib.suppress(OSError):
                placed(store.folder, file["name"]).unlink()
        return before - _bytes(store)


def unnamed_files(store: Store) -> list[str]:
    """Vectors that the database does not name: what a killed `compact` left."""
    there = [*store.folder.glob("exact*.f32"), *(store.folder / "vectors").glob("*.f32")]
    with store.database.reading() as connection:
        named = {row["name"] for row in connection.execute("SELECT name FROM files")}
    return sorted({path.relative_to(store.folder).as_posix() for path in there} - named)


def _rewrite(store: Store, file: sqlite3.Row, path: Path) -> list[tuple[int, int, int]]:
    with store.database.reading() as connection:
        blocks = connection.execute(
            "SELECT models.name, model, first, rows, checksum FROM blocks JOIN models ON models.id = model "
            "WHERE file = ? AND removed IS NULL ORDER BY first",
            (file["id"],),
        ).fetchall()
    places, end = [], 0
    old = placed(store.folder, file["name"])
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for block in blocks:
            rows = read_rows(old, block["first"], block["rows"], file["width"])
            if checksum(rows) != block["checksum"]:
                raise DamagedFile(f"{old} has other bytes than were written for {block['name']!r}. {REPAIR}")
            write_all(handle, rows)
            places.append((end, file["id"], block["model"]))
            end += block["rows"]
        os.fsync(handle)
    finally:
        os.close(handle)
    sync_folder(path.parent)
    return places


def _turn(store: Store, places: list[tuple[int, int, int]], names: list[tuple[str, int]]) -> None:
    with store.database.writing() as connection:
        for table in ("blocks", "tags"):
            connection.execute(f"DELETE FROM {table} WHERE model IN (SELECT id FROM models WHERE removed IS NOT NULL)")
        connection.execute("DELETE FROM models WHERE removed IS NOT NULL")
        # Places are unique: they move out of the way before they take their new ones.
        connection.execute("UPDATE blocks SET first = -1 - first")
        connection.executemany("UPDATE blocks SET first = ? WHERE file = ? AND model = ?", places)
        connection.executemany("UPDATE files SET name = ? WHERE id = ?", names)


def _names_any(store: Store, names: list[tuple[str, int]]) -> bool:
    """Whether the database has turned to the new files, in spite of an error or an interruption."""
    with store.database.reading() as connection:
        there = {row["name"] for row in connection.execute("SELECT name FROM files")}
    return any(name in there for name, _ in names)


def _bytes(store: Store) -> int:
    with store.database.reading() as connection:
        names = [row["name"] for row in connection.execute("SELECT name FROM files")]
    return sum(path.stat().st_size for path in (placed(store.folder, name) for name in names) if path.exists())


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
                remove(connection, model, "lost bytes")
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
