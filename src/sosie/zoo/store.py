"""Writing a zoo: rows go to files that only grow, then one transaction says that they exist."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..files import DamagedFile
from .database import REPAIR, Database, UnknownModel, ZooGone, only_writer, parsed
from .vectors import (
    Rows,
    Verified,
    append_rows,
    changed,
    checksum,
    cut_tail,
    file_name,
    mapped,
    placed,
    read_rows,
    sync_folder,
)

# Which models: by tag, architecture, task; as SQL with its values apart

MOST = 500  # SQL has a limit, too


def where(
    tag: str | Sequence[str] | None = None,
    architecture: str | Sequence[str] | None = None,
    task: str | Sequence[str] | None = None,
) -> tuple[str, list[Any]]:
    """A condition on `models`; several tags must all be there, of several architectures or tasks one."""
    parts, values = ["models.removed IS NULL"], []
    for one in several(tag, "tag"):
        parts.append("EXISTS (SELECT 1 FROM tags WHERE tags.model = models.id AND tags.tag = ?)")
        values.append(one)
    for column, asked in (("architecture", architecture), ("task", task)):
        if asked is not None:
            wanted = several(asked, column)
            parts.append(f"models.{column} IN ({', '.join('?' * len(wanted))})")
            values += wanted
    return " AND ".join(parts), values


def several(asked: str | Sequence[str] | None, what: str) -> tuple[str, ...]:
    """One or more texts, however they were given."""
    found = () if asked is None else (asked,) if isinstance(asked, str) else tuple(asked)
    if not all(isinstance(one, str) for one in found):
        raise TypeError(f"{what}= is text or a list of texts, got {asked!r}")
    if len(found) > MOST:
        raise ValueError(f"{what}= has {len(found):,} texts; {MOST} at most")
    return found


# What models, tags and kinds may be called; whoever shows a name escapes it

LONGEST = 200  # letters of a name
LONGEST_TEXT = 2000  # letters of a source or of a task
_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}(?:[:.-][a-z0-9_]{1,64}){0,3}")


def check_name(name: Any, what: str = "name") -> str:
    """The name, if it is printable, of 1 to 200 letters, without path separators, and neither "." nor ".."."""
    text = check_text(name, what, LONGEST)
    if text in (".", ".."):
        raise ValueError(f"a {what} cannot be {text!r}, which names a folder")
    if "/" in text or "\\" in text:
        raise ValueError(f"a {what} has no path separators, got {_shown(text)}: write - or : in their place")
    return text


def check_text(text: Any, what: str, longest: int = LONGEST_TEXT) -> str:
    """Printable text that is not empty, does not begin or end with a space, and is not longer than that."""
    if not isinstance(text, str):
        raise TypeError(f"a {what} is text, got {type(text).__name__}")
    if not text:
        raise ValueError(f"a {what} cannot be empty")
    if len(text) > longest:
        raise ValueError(f"a {what} has at most {longest} letters, got {len(text):,}: {_shown(text)}")
    if not text.isprintable():
        wrong = next(letter for letter in text if not letter.isprintable())
        raise ValueError(f"a {what} is printable, got {_shown(text)} with U+{ord(wrong):04X} in it")
    if text != text.strip():
        raise ValueError(f"a {what} does not begin or end with a space, got {_shown(text)}")
    return text


def check_tags(tags: Iterable[str] | str) -> tuple[str, ...]:
    """Tags in order, each once; one text is one tag."""
    each = [tags] if isinstance(tags, str) else list(tags)
    return tuple(dict.fromkeys(check_name(tag, "tag") for tag in each))


def check_kind(kind: Any) -> str:
    """A kind of vectors, of which the name of a file is made: cka, atoms:0f3a…"""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError(f"a kind of vectors is called like cka or atoms:0f3a, got {_shown(str(kind))}")
    return kind


def _shown(text: str) -> str:
    short = text if len(text) <= 60 else text[:57] + "…"
    return ascii(short) if not short.isprintable() else repr(short)


# What the store keeps of a model: facts, and rows by kind

MOST_ROWS = 4096  # of one kind, of one model
MOST_LETTERS = 1000  # of a site's name


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of one kind with the sites that they are of."""

    vectors: Rows
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        shape = self.vectors.shape
        if self.vectors.dtype != np.float32 or len(shape) != 2 or not shape[0] or not shape[1]:
            raise ValueError(f"vectors are float32 (sites, width), got {self.vectors.dtype} {shape}")
        if len(self.labels) != shape[0] or shape[0] > MOST_ROWS:
            raise ValueError(f"{len(self.labels)} sites for vectors of shape {shape}; at most {MOST_ROWS} sites")
        if wrong := [label for label in self.labels if not isinstance(label, str) or len(label) > MOST_LETTERS]:
            raise ValueError(f"a site is called by text of at most {MOST_LETTERS} letters, got {str(wrong[0])[:60]!r}")
        if not np.isfinite(self.vectors).all():
            raise ValueError("vectors with values that are not finite")


@dataclass(frozen=True)
class Facts:
    """What is known of a model beside its vectors; None: not said."""

    tags: tuple[str, ...] = ()
    task: str | None = None
    source: str | None = None
    parent: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", check_tags(self.tags))
        for name in ("task", "source"):
            if getattr(self, name) is not None:
                check_text(getattr(self, name), name)
        if self.parent is not None:
            check_name(self.parent, "parent")


@dataclass(frozen=True, eq=False)
class Record:
    """A model that is to be written."""

    name: str
    digest: str  # of the weights
    architecture: str
    parameters: int
    blocks: dict[str, Block]  # by kind
    facts: Facts = field(default_factory=Facts)
    about: dict[str, Any] = field(default_factory=dict)  # JSON

    def __post_init__(self) -> None:
        check_name(self.name)
        check_text(self.digest, "digest")
        check_text(self.architecture, "architecture")
        if (
            isinstance(self.parameters, bool)
            or not isinstance(self.parameters, int)
            or not 0 <= self.parameters < 2**63
        ):
            raise ValueError(f"{self.name!r}: a number of parameters is a whole number, got {self.parameters!r}")
        try:
            json.dumps([self.about, *(block.labels for block in self.blocks.values())], ensure_ascii=False).encode()
            json.dumps(self.about, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:  # half a character; numbers that JSON has not
            raise ValueError(f"{self.name!r}: what is said of it cannot be kept: {error}") from error
        for kind in self.blocks:
            check_kind(kind)


@dataclass(frozen=True, eq=False)
class Stored(Record):
    """A model that was read."""

    id: int = 0
    added: str = ""


@dataclass(frozen=True, eq=False)
class Mapped:
    """All rows of a kind, those of removed models among them, and which belong to whom.

    They are not verified before they are read: whoever reads rows calls `verify` for their models first.
    """

    kind: str
    rows: Rows  # (all rows, width), on the disk
    models: NDArray[np.int64]  # ids, in the order of their rows
    first: NDArray[np.int64]  # row of each
    count: NDArray[np.int64]  # rows of each
    sums: NDArray[np.object_] | None = None  # checksum of each; None: of rows that lie in no file
    verified: Verified = field(default_factory=Verified)

    def verify(self, places: Any = slice(None)) -> None:
        """Compare the rows of these models with their checksums, unless that was done before in this process."""
        if self.sums is None:
            return
        first, count, sums, models = self.first[places], self.count[places], self.sums[places], self.models[places]
        rows = np.asarray(self.rows)
        for k in self.verified.missing(first):
            if checksum(rows[first[k] : first[k] + count[k]]) != sums[k]:
                raise changed(getattr(self.rows, "filename", self.kind), f"model number {models[k]}")
        self.verified.add(first)

    def owner(self, row: int) -> tuple[int, int]:
        """The model that a row is of, and which of its rows it is."""
        k = int(np.searchsorted(self.first, row, side="right")) - 1
        if k < 0 or not 0 <= row - self.first[k] < self.count[k]:
            raise KeyError(f"row {row} of {self.kind} belongs to no model")
        return int(self.models[k]), int(row - self.first[k])

    def owners(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where among the models those are that rows belong to."""
        return np.searchsorted(self.first, rows, side="right") - 1

    def part(self, chosen: Any) -> Mapped:
        """Some of the models, by their places, in the order of their rows."""
        sums = None if self.sums is None else self.sums[chosen]
        found = self.models[chosen], self.first[chosen], self.count[chosen]
        return Mapped(self.kind, self.rows, *found, sums, self.verified)

    def index(self) -> NDArray[np.int64]:
        """The rows of the models, in order."""
        if not len(self.first):
            return np.empty(0, np.int64)
        before = np.cumsum(self.count) - self.count
        return np.repeat(self.first - before, self.count) + np.arange(int(self.count.sum()))


# Reading a zoo: each answer is of one moment, whatever a writer does meanwhile

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


# What is said to the database when models come, change and go; inside a transaction that somebody else holds


def insert(connection: sqlite3.Connection, record: Record, places: Mapping[tuple[str, str], int], added: str) -> None:
    """A model whose rows are written: `places` has the first of each kind, by (name, kind)."""
    facts = record.facts
    row = (record.name, record.digest, record.architecture, record.parameters, facts.task, facts.source, facts.parent)
    about = json.dumps(record.about, ensure_ascii=False, allow_nan=False)
    model = connection.execute(
        "INSERT INTO models (name, digest, architecture, parameters, task, source, parent, added, about) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*row, added, about),
    ).lastrowid
    assert model is not None
    for kind, block in record.blocks.items():
        _insert_block(connection, model, kind, block, places[record.name, kind])
    connection.executemany("INSERT INTO tags VALUES (?, ?)", [(model, tag) for tag in facts.tags])
    connection.execute("DELETE FROM failed WHERE name = ?", (record.name,))


def _insert_block(connection: sqlite3.Connection, model: int, kind: str, block: Block, first: int) -> None:
    width = block.vectors.shape[1]
    connection.execute(
        "INSERT OR IGNORE INTO files (kind, width, name) VALUES (?, ?, ?)", (kind, width, file_name(kind, width))
    )
    file = connection.execute("SELECT id FROM files WHERE kind = ? AND width = ?", (kind, width)).fetchone()["id"]
    labels = json.dumps(block.labels, ensure_ascii=False)
    connection.execute(
        "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)",
        (model, file, first, len(block.labels), checksum(block.vectors), labels),
    )


def update(connection: sqlite3.Connection, model: int, facts: Facts, drop: Sequence[str] = ()) -> None:
    """Tags are added and dropped; of the other facts those that are given are taken."""
    connection.executemany("DELETE FROM tags WHERE model = ? AND tag = ?", [(model, tag) for tag in drop])
    connection.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", [(model, tag) for tag in facts.tags])
    for column in ("task", "source", "parent"):
        if (value := getattr(facts, column)) is not None:
            connection.execute(f"UPDATE models SET {column} = ? WHERE id = ?", (value, model))


def remove(connection: sqlite3.Connection, model: int, why: str) -> None:
    """Its blocks stay: a reader may have them mapped."""
    connection.execute("UPDATE models SET removed = ? WHERE id = ?", (f"{now()} {why}", model))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


FileKey = tuple[str, int]  # kind and width


class NameTaken(ValueError):
    """Another model has that name."""


class Store(Reader):
    """A folder that can be changed: every change is one transaction, made by one writer at a time."""

    @classmethod
    def create(cls, folder: Path, about: Mapping[str, Any], wait: float) -> Store:
        """In a folder that is there and empty but for the probe set."""
        (folder / "vectors").mkdir()
        Database.create(folder / "zoo.sqlite", dict(about), wait)
        sync_folder(folder)
        return cls(folder, wait)

    def writer(self) -> AbstractContextManager[None]:
        if not self.folder.is_dir():
            raise ZooGone(f"no folder {self.folder}: the zoo was moved or deleted")
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(f"{self.folder} cannot be written to: it is read-only")
        return only_writer(self.folder / "zoo.lock", self.wait)

    def append(
        self, records: Sequence[Record], *, replace: bool = False, added: Sequence[str] | None = None
    ) -> list[bool]:
        """Write models; whether each is new. One that is there with the same digest only gets the facts given.

        Rows first, synced; then one transaction names them, and from then on the models exist: all of them, or none.
        """
        if len({record.name for record in records}) < len(records):
            raise ValueError("a name more than once among the models to add")
        with self.writer():
            there = [self._there(record, replace) for record in records]
            new = [record for record, (_, same) in zip(records, there, strict=True) if not same]
            files = _by_file(new)
            try:
                places = self._write_rows(files)
                with self.database.writing() as connection:
                    for k, (record, (model, same)) in enumerate(zip(records, there, strict=True)):
                        if same:
                            assert model is not None
                            update(connection, model, record.facts)
                            continue
                        if model is not None:
                            remove(connection, model, "replaced")
                        when = now() if added is None else added[k]
                        insert(connection, record, places, when)
            except Exception:
                self._cut_tails(files)
                raise
        return [not same for _, same in there]

    def _there(self, record: Record, replace: bool) -> tuple[int | None, bool]:
        """The model of that name, if there is one, and whether it is this very one."""
        with self.database.reading() as connection:
            row = connection.execute(
                "SELECT id, digest FROM models WHERE name = ? AND removed IS NULL", (record.name,)
            ).fetchone()
        if row is None:
            return None, False
        if not replace and row["digest"] != record.digest:
            raise NameTaken(
                f"{record.name!r} is in the zoo with other weights ({row['digest']}, these are {record.digest}): add "
                "it under another name, or with replace=True (--replace) in place of the old one"
            )
        return row["id"], not replace

    def _write_rows(self, files: Mapping[FileKey, list[tuple[str, Block]]]) -> dict[tuple[str, str], int]:
        """Append the rows of each file; the first row of each model, by (name, kind)."""
        places: dict[tuple[str, str], int] = {}
        for (kind, width), blocks in files.items():
            name, end = self._end(kind, width)
            append_rows(placed(self.folder, name), end, [block.vectors for _, block in blocks])
            for model, block in blocks:
                places[model, kind] = end
                end += len(block.labels)
        return places

    def _end(self, kind: str, width: int) -> tuple[str, int]:
        """The file of a kind, and how many of its rows the database names."""
        with self.database.reading() as connection:
            row = connection.execute(
                "SELECT id, name FROM files WHERE kind = ? AND width = ?", (kind, width)
            ).fetchone()
            if row is None:
                return file_name(kind, width), 0
            last = connection.execute(
                "SELECT first + rows FROM blocks WHERE file = ? ORDER BY first DESC LIMIT 1", (row["id"],)
            ).fetchone()
        return row["name"], last[0] if last else 0

    def _cut_tails(self, files: Mapping[FileKey, Any]) -> None:
        """Give the room back that a failed add took; what the database names is never touched."""
        with contextlib.suppress(Exception):
            for kind, width in files:
                name, end = self._end(kind, width)
                cut_tail(placed(self.folder, name), end, width)

    def remove(self, names: Sequence[str]) -> None:
        """Mark models as removed: all of them, or none. `compact` gives their room back. Failed ones are forgotten."""
        with self.writer(), self.database.writing() as connection:
            for name in names:
                if not connection.execute("DELETE FROM failed WHERE name = ?", (name,)).rowcount:
                    remove(connection, self.id_of(connection, name), "removed")

    def change_facts(self, name: str, facts: Facts, drop: Sequence[str] = ()) -> None:
        with self.writer(), self.database.writing() as connection:
            update(connection, self.id_of(connection, name), facts, drop)

    def record_failure(self, name: str, reason: str, source: str | None) -> None:
        with self.writer(), self.database.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO failed VALUES (?, ?, ?, ?)", (name, reason, source, now()))

    def forget_failures(self) -> None:
        with self.writer(), self.database.writing() as connection:
            connection.execute("DELETE FROM failed")


def _by_file(records: Sequence[Record]) -> dict[FileKey, list[tuple[str, Block]]]:
    found: dict[FileKey, list[tuple[str, Block]]] = {}
    for record in records:
        for kind, block in record.blocks.items():
            found.setdefault((kind, block.vectors.shape[1]), []).append((record.name, block))
    return found


# Lists of models: pages of them, what there is to filter by, and who is related to whom by what was recorded

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
