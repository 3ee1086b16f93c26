"""Upkeep of a zoo: is everything there that the database names, and can the room of removed models be given back?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..files import DamagedFile
from ..progress import track
from .store import END, Store, errors_in_words, remove
from .vectors import ITEM, changed, checksum, file_name, generation_of, path_of, read_rows, write_rows


def compact(store: Store) -> int:
    """Give back the room of removed models; how many bytes that was. Readers keep what they have mapped.

    New files without those rows are written beside the old ones; the transaction that ends it turns to them.
    """
    made: list[Path] = []
    old: list[Path] = []
    with store.writing() as connection:
        for name in _unnamed_files(store):  # of one that was killed
            path_of(store.folder, name).unlink(missing_ok=True)
        try:
            for file in connection.execute("SELECT id, kind, width, name FROM files").fetchall():
                name = file_name(file["kind"], file["width"], generation_of(file["name"]) + 1)
                old.append(path_of(store.folder, file["name"]))
                made.append(path_of(store.folder, name))
                places = _copy_rows(store, file, old[-1], made[-1])
                # Places are unique: they move out of the way before they take their new ones.
                connection.execute("UPDATE blocks SET first = -1 - first WHERE file = ?", (file["id"],))
                connection.executemany("UPDATE blocks SET first = ? WHERE file = ? AND model = ?", places)
                connection.execute("UPDATE files SET name = ? WHERE id = ?", (name, file["id"]))
            for table in ("blocks", "tags"):
                removed = "(SELECT id FROM models WHERE removed IS NOT NULL)"
                connection.execute(f"DELETE FROM {table} WHERE model IN {removed}")
            connection.execute("DELETE FROM models WHERE removed IS NOT NULL")
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            raise
    before = sum(path.stat().st_size for path in old if path.exists())
    for path in old:
        with contextlib.suppress(OSError):
            path.unlink()
    return before - sum(path.stat().st_size for path in made if path.exists())


def _copy_rows(store: Store, file: Any, old: Path, new: Path) -> list[tuple[int, int, int]]:
    """Write the rows of models that are there, a model at a time; the first row, the file and the model of each."""
    blocks = store.select(
        "SELECT models.name, model, first, rows, checksum FROM blocks JOIN models ON models.id = model "
        "WHERE file = ? AND removed IS NULL ORDER BY first",
        (file["id"],),
    )

    def each() -> Iterator[Any]:
        for block in blocks:
            rows = read_rows(old, block["first"], block["rows"], file["width"])
            if checksum(rows) != block["checksum"]:
                raise changed(old, repr(block["name"]))
            yield rows

    write_rows(new, 0, each())
    places, end = [], 0
    for block in blocks:
        places.append((end, file["id"], block["model"]))
        end += block["rows"]
    return places


def find_problems(store: Store) -> list[dict[str, Any]]:
    """What is not as it should be, in the rows of `Report`.

    `what`: "lost" (a model without all of its bytes), "database"; harmless, since the next writer overwrites it: "tail"
    and "leftover".
    """
    while True:
        files = store.files()
        problems = [*_damage(store), *_lost_blocks(store), *_leftovers(store)]
        if store.files() == files:  # else the zoo was compacted meanwhile
            return problems


def problem(what: str, text: str, **more: Any) -> dict[str, Any]:
    return {"what": what, "text": text, "model": None, "model_id": None, "file": None, "harmless": False} | more


def mend(store: Store, problems: Sequence[dict[str, Any]]) -> set[str]:
    """Drop models that lost bytes, cut off what nobody names, unlink what nobody reads; inside a transaction.

    Returns the kinds of problems that there are no longer.
    """
    with store.reading() as connection:
        for model in {each["model_id"] for each in problems if each["what"] == "lost"}:
            remove(connection, model, "lost bytes")
        for file in connection.execute("SELECT id, width, name FROM files").fetchall():
            # Blocks past the end of their file: no reader can have mapped them, and the next add is to write there.
            path = path_of(store.folder, file["name"])
            whole = (path.stat().st_size if path.exists() else 0) // (file["width"] * ITEM)
            connection.execute("DELETE FROM blocks WHERE file = ? AND first + rows > ?", (file["id"], whole))
    for path, size, _ in _sizes(store):
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)
    for each in problems:
        if each["what"] == "leftover":
            path_of(store.folder, each["file"]).unlink(missing_ok=True)
    return {"lost", "tail", "leftover"}


def _damage(store: Store) -> Iterator[dict[str, Any]]:
    """What SQLite finds wrong with its own file."""
    with errors_in_words(store.path), store.reading() as connection:
        for row in connection.execute("PRAGMA integrity_check(20)").fetchall():
            if row[0] != "ok":
                yield problem("database", f"{store.path}: {row[0]}")
        for row in connection.execute("PRAGMA foreign_key_check").fetchall():
            yield problem("database", f"{store.path}: a row of {row[0]} belongs to nothing")


def _lost_blocks(store: Store) -> Iterator[dict[str, Any]]:
    """Every block of a model that is there must be whole, where no other is, with the bytes that were written."""
    with store.reading() as connection:
        rows = connection.execute(
            "SELECT models.name AS model, models.id AS id, files.id AS file, files.name AS name, width, first, rows, "
            "checksum, removed, CASE WHEN json_valid(labels) AND json_valid(about) "
            "THEN json_array_length(labels) = rows ELSE 0 END AS readable "
            "FROM blocks JOIN models ON models.id = model JOIN files ON files.id = file "
            "ORDER BY files.id, first"
        ).fetchall()
    end: dict[int, int] = {}
    for row in track(rows, "checking the vectors", len(rows), "blocks"):
        overlaps = row["first"] < end.get(row["file"], 0)
        end[row["file"]] = row["first"] + row["rows"]
        if row["removed"] is None and (why := _wrong(store, row, overlaps)):
            text = f"{row['model']!r}: {row['name']} {why}"
            yield problem("lost", text, model=row["model"], model_id=row["id"], file=row["name"])


def _wrong(store: Store, row: Any, overlaps: bool) -> str:
    path = path_of(store.folder, row["name"])
    wanted = (row["first"] + row["rows"]) * row["width"] * ITEM
    if not row["readable"]:
        return "has rows whose sites, or what is known of the model, cannot be read"
    if overlaps:
        return f"has rows of another model among its own (from row {row['first']} on)"
    try:
        if (size := path.stat().st_size) < wanted:
            return f"was cut off at byte {size:,}, its rows go up to byte {wanted:,}"
        rows = read_rows(path, row["first"], row["rows"], row["width"])
    except FileNotFoundError:
        return "is gone"
    except (DamagedFile, OSError) as error:
        return f"cannot be read: {error}"
    return "" if checksum(rows) == row["checksum"] else f"was changed from row {row['first']} on"


def _leftovers(store: Store) -> Iterator[dict[str, Any]]:
    """What a killed writer left."""
    for path, size, name in _sizes(store):
        with contextlib.suppress(FileNotFoundError):  # its lost rows are reported above
            if (extra := path.stat().st_size - size) > 0:
                text = f"{name} has {extra:,} bytes at its end that belong to no model: the next add overwrites them"
                yield problem("tail", text, file=name, harmless=True)
    for name in _unnamed_files(store):
        yield problem("leftover", f"{name} belongs to nothing: the next compact removes it", file=name, harmless=True)


def _sizes(store: Store) -> list[tuple[Path, int, str]]:
    """Each file of vectors, the bytes of it that the database names, and its name there."""
    rows = store.select(f"SELECT name, width, {END} FROM files")
    return [(path_of(store.folder, row["name"]), row["end"] * row["width"] * ITEM, row["name"]) for row in rows]


def _unnamed_files(store: Store) -> list[str]:
    """Vectors that the database does not name: what a killed `compact` left."""
    there = [*store.folder.glob("exact*.f32"), *(store.folder / "vectors").glob("*.f32")]
    return sorted({path.relative_to(store.folder).as_posix() for path in there} - {*store.files().values()})
