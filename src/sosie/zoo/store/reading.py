"""Reading a zoo: each answer is of one moment, whatever a writer does meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...results import DamagedFile
from .database import Database
from .errors import REPAIR, UnknownModel, parsed
from .filters import where
from .names import check_name
from .record import Block, Facts, Mapped, Stored
from .vectors import Verified, changed, checksum, mapped, placed, read_rows

T = TypeVar("T")
TRIES = 5  # a reader meets files that were compacted away meanwhile, and looks again


class Reader:
    """A folder that exists."""

    def __init__(self, folder: Path, wait: float) -> None:
        self.folder, self.wait = folder, wait
        self.database = Database(folder / "zoo.sqlite", wait)
        self._verified: dict[str, Verified] = {}  # by file

    def id_of(self, connection: sqlite3.Connection, name: str) -> int:
        check_name(name)
        row = connection.execute("SELECT id FROM models WHERE name = ? AND removed IS NULL", (name,)).fetchone()
        if row is None:
            names = connection.execute("SELECT name FROM models WHERE removed IS NULL LIMIT 5000")
            near = get_close_matches(str(name), [row["name"] for row in names], n=3)
            raise UnknownModel(
                f"no model {name!r} in {self.folder}" + (f"; near it: {', '.join(near)}" if near else "")
            )
        return int(row["id"])

    def count(self) -> int:
        with self.database.reading() as connection:
            return int(connection.execute("SELECT count(*) FROM models WHERE removed IS NULL").fetchone()[0])

    def has(self, name: str) -> bool:
        with self.database.reading() as connection:
            found = connection.execute("SELECT 1 FROM models WHERE name = ? AND removed IS NULL", (name,)).fetchone()
        return found is not None

    def digest(self, name: str) -> str | None:
        """Of the weights of the model of that name; None where there is none."""
        with self.database.reading() as connection:
            row = connection.execute("SELECT digest FROM models WHERE name = ? AND removed IS NULL", (name,)).fetchone()
        return None if row is None else str(row["digest"])

    def rows(self, limit: int | None = None, offset: int = 0, **filters: Any) -> list[dict[str, Any]]:
        """A dict for each model, in the order they were added."""
        condition, values = where(**filters)
        text = f"""
          SELECT id, name, architecture, parameters, task, source, parent, added, digest,
            (SELECT json_group_array(tag) FROM (SELECT tag FROM tags WHERE model = models.id ORDER BY tag)) AS tags,
            (SELECT json_group_object(files.kind, blocks.rows) FROM blocks JOIN files ON files.id = blocks.file
             WHERE blocks.model = models.id) AS kinds
          FROM models WHERE {condition} ORDER BY id LIMIT ? OFFSET ?"""
        with self.database.reading() as connection:
            found = connection.execute(text, (*values, -1 if limit is None else limit, offset)).fetchall()
        return [{**dict(row), "tags": parsed(row["tags"]), "kinds": parsed(row["kinds"])} for row in found]

    def failures(self) -> list[dict[str, Any]]:
        with self.database.reading() as connection:
            return [dict(row) for row in connection.execute("SELECT * FROM failed ORDER BY at, name")]

    def read(self, name: str | int, kinds: Sequence[str] | None = None) -> Stored:
        """A model, by name or id, with its vectors, whose checksums are looked at; some kinds of them, or all."""
        return self._again(lambda: self._read(name, kinds))

    def _read(self, name: str | int, kinds: Sequence[str] | None) -> Stored:
        with self.database.reading() as connection:
            model = name if isinstance(name, int) else self.id_of(connection, name)
            row = connection.execute("SELECT * FROM models WHERE id = ?", (model,)).fetchone()
            if row is None:
                raise UnknownModel(f"the model {name} of {self.folder} was removed meanwhile")
            tags = connection.execute("SELECT tag FROM tags WHERE model = ? ORDER BY tag", (row["id"],)).fetchall()
            places = connection.execute(
                "SELECT kind, width, name, first, rows, checksum, labels FROM blocks JOIN files ON files.id = file "
                "WHERE model = ? ORDER BY files.id",
                (row["id"],),
            ).fetchall()
        blocks = {p["kind"]: self._block(p, row["name"]) for p in places if kinds is None or p["kind"] in kinds}
        facts = Facts(tuple(tag["tag"] for tag in tags), row["task"], row["source"], row["parent"])
        return Stored(
            row["name"], row["digest"], row["architecture"], row["parameters"], blocks, facts, parsed(row["about"]),
            id=row["id"], added=row["added"],
        )  # fmt: skip

    def _block(self, place: sqlite3.Row, name: str) -> Block:
        path = placed(self.folder, place["name"])
        rows = read_rows(path, place["first"], place["rows"], place["width"])
        if checksum(rows) != place["checksum"]:
            raise changed(path, repr(name))
        return Block(rows, tuple(parsed(place["labels"])))

    def mapped(self, kind: str, **filters: Any) -> Mapped:
        """The rows of a kind on the disk, and where those of the models are that pass the filters."""
        return self._again(lambda: self._mapped(kind, **filters))

    def _mapped(self, kind: str, **filters: Any) -> Mapped:
        condition, values = where(**filters)
        with self.database.reading() as connection:
            file = connection.execute("SELECT id, width, name FROM files WHERE kind = ?", (kind,)).fetchone()
            if file is None:
                there = ", ".join(row["kind"] for row in connection.execute("SELECT kind FROM files ORDER BY id"))
                raise UnknownModel(f"no vectors of kind {kind!r} in {self.folder}; there are {there or 'none yet'}")
            found = connection.execute(
                "SELECT blocks.model, blocks.first, blocks.rows, blocks.checksum "
                "FROM blocks JOIN models ON models.id = blocks.model "
                f"WHERE blocks.file = ? AND {condition} ORDER BY blocks.first",
                (file["id"], *values),
            ).fetchall()
        spans = np.array([tuple(row)[:3] for row in found], np.int64).reshape(-1, 3)
        sums = np.array([row[3] for row in found], object)
        end = int(spans[-1, 1] + spans[-1, 2]) if len(spans) else 0
        rows = mapped(placed(self.folder, file["name"]), end, file["width"])
        models, first, count = (np.ascontiguousarray(column) for column in spans.T)
        verified = self._verified.setdefault(file["name"], Verified())
        return Mapped(kind, rows, models, first, count, sums, verified)

    def files(self) -> list[str]:
        """Where the vectors of each kind are; others once the zoo was compacted."""
        with self.database.reading() as connection:
            return [row["name"] for row in connection.execute("SELECT name FROM files ORDER BY id")]

    def kinds(self) -> list[str]:
        with self.database.reading() as connection:
            return [row["kind"] for row in connection.execute("SELECT kind FROM files ORDER BY id")]

    def all_names(self) -> list[str]:
        """In the order they were added."""
        with self.database.reading() as connection:
            found = connection.execute("SELECT name FROM models WHERE removed IS NULL ORDER BY id")
            return [row["name"] for row in found]

    def names(self, ids: Sequence[int]) -> dict[int, str]:
        """The names of models by their ids, also of those removed meanwhile."""
        found: dict[int, str] = {}
        with self.database.reading() as connection:
            for start in range(0, len(ids), 500):
                some = list(map(int, ids[start : start + 500]))
                marks = ", ".join("?" * len(some))
                found |= dict(
                    tuple(row) for row in connection.execute(f"SELECT id, name FROM models WHERE id IN ({marks})", some)
                )
        return found

    def described(self, ids: Sequence[int], kind: str) -> dict[int, dict[str, Any]]:
        """By id what is known of models, with the sites that they have of a kind."""
        found: dict[int, dict[str, Any]] = {}
        text = """
          SELECT models.id, models.name, architecture, parameters, task, parent, source, digest, blocks.labels,
            (SELECT json_group_array(tag) FROM (SELECT tag FROM tags WHERE model = models.id ORDER BY tag)) AS tags
          FROM models JOIN blocks ON blocks.model = models.id JOIN files ON files.id = blocks.file
          WHERE files.kind = ? AND models.id IN """
        with self.database.reading() as connection:
            for start in range(0, len(ids), 500):
                some = list(map(int, ids[start : start + 500]))
                for row in connection.execute(f"{text} ({', '.join('?' * len(some))})", (kind, *some)):
                    found[row["id"]] = {
                        **dict(row),
                        "tags": parsed(row["tags"]),
                        "labels": parsed(row["labels"]),
                    }
        return found

    def same_digests(self, kind: str, **filters: Any) -> list[tuple[int, str]]:
        """Models with vectors of a kind whose weights others have, too: id and digest, in the order of their rows."""
        condition, values = where(**filters)
        text = f"""
          SELECT models.id, models.digest FROM models
          JOIN blocks ON blocks.model = models.id JOIN files ON files.id = blocks.file
          WHERE files.kind = ? AND {condition} AND models.digest IN (
            SELECT digest FROM models WHERE removed IS NULL AND digest != 'unknown' GROUP BY digest HAVING count(*) > 1)
          ORDER BY blocks.first"""
        with self.database.reading() as connection:
            return [(row["id"], row["digest"]) for row in connection.execute(text, (kind, *values))]

    def related(self, name: str, parent: str | None) -> list[tuple[str, str]]:
        """Models that were recorded as children of a model, or of its parent, each with whose child it is."""
        with self.database.reading() as connection:
            found = connection.execute(
                "SELECT name, parent FROM models WHERE removed IS NULL AND parent IN (?, ?) ORDER BY id", (name, parent)
            ).fetchall()
        return [(row["name"], row["parent"]) for row in found]

    def _again(self, read: Callable[[], T]) -> T:
        for _ in range(TRIES - 1):
            try:
                return read()
            except FileNotFoundError:
                continue
        try:
            return read()
        except FileNotFoundError as error:
            raise DamagedFile(f"{error.filename} is gone, but models have their vectors in it. {REPAIR}") from error
