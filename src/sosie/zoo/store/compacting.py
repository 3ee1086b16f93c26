"""Vectors without those of removed models: new files beside the old, then one transaction that turns to them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from ...results import DamagedFile
from .errors import NO_ROOM, REPAIR
from .store import Store
from .vectors import checksum, file_name, generation_of, no_room, placed, read_rows, sync_folder, write_all


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
