"""The store of a zoo: SQLite records which models there are and where their vectors lie; a change is one transaction.

Rows are appended to flat files and synced inside the transaction that names them, so a model exists, whole, from its
commit on. SQLite lets one process write at a time and any number read meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from errno import EDQUOT, EFBIG, ENOSPC
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from ..checks import listed, nearest, whole_number
from ..files import DamagedFile, reading
from .vectors import (
    ITEM,
    REPAIR,
    Floats,
    Vectors,
    changed,
    checksum,
    file_name,
    map_rows,
    path_of,
    read_rows,
    sync_folder,
    write_rows,
)

T = TypeVar("T")
Places = dict[tuple[str, str], tuple[int, int]]  # (model name, kind) → (file id, first row)

# Errors


class ZooBusy(TimeoutError):
    """Another process is writing."""


class ZooGone(OSError):
    """The folder that was opened was moved, deleted or replaced."""


class UnknownModel(KeyError, ValueError):
    """Nothing in the zoo has that name: no model, kind of vectors, cluster or run."""

    def __str__(self) -> str:
        return str(self.args[0])


class NameTaken(ValueError):
    """Another model has that name."""


class DiskFull(OSError):
    """The disk is full; the zoo is unchanged."""

    errno = ENOSPC


NO_ROOM = "no room left on the disk for {}: make some and try again; the zoo is as it was"


@contextmanager
def errors_in_words(path: Path, wait: float = 0.0) -> Iterator[None]:
    """Turn errors of SQLite, and of a full disk, into errors that name the next step."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            longer = max(60, 6 * wait)
            raise ZooBusy(
                f"{path} is being written to by another process; waited {wait:g} s. Try again when that process is "
                f"done, or wait longer: --wait {longer:g}, in Python Zoo(folder, wait={longer:g})"
            ) from error
        if code == sqlite3.SQLITE_FULL:
            raise DiskFull(NO_ROOM.format(path)) from error
        if code == sqlite3.SQLITE_IOERR:  # also what a quota or a limit on the size of files gives
            raise OSError(
                f"{path} cannot be read or written ({error}): the disk may be full, over its quota, or failing; the "
                "change was undone"
            ) from error
        damage = ("Could not decode", "no such column", "malformed")  # changed bytes that SQLite does not check for
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or str(error).startswith(damage):
            raise DamagedFile(
                f"{path} is damaged ({error}): restore the folder from a copy, or import an exported file"
            ) from error
        if code == sqlite3.SQLITE_READONLY:
            raise PermissionError(f"{path} cannot be written to: the folder or the file is read-only") from error
        if code == sqlite3.SQLITE_CANTOPEN:
            raise PermissionError(f"{path} cannot be opened ({error})") from error
        raise
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT, EFBIG) and not isinstance(error, DiskFull):
            raise DiskFull(NO_ROOM.format(path)) from error
        raise


# Names of models and tags, and filters; whoever shows a name escapes it

LONGEST = 200  # letters of a name
LONGEST_TEXT = 2000  # letters of a source or of a task
MOST_TEXTS = 500  # of one filter
Filter = str | Iterable[str] | None


def check_name(name: Any, what: str = "name") -> str:
    """Return the name if it is short printable text that cannot be mistaken for a path."""
    text = check_text(name, what, LONGEST)
    if text in (".", "..") or "/" in text or "\\" in text:
        raise ValueError(f"a {what} has no path separators and is not the name of a folder, got {_shown(text)}")
    return text


def check_text(text: Any, what: str, longest: int = LONGEST_TEXT) -> str:
    """Return the text if it is printable, not empty, not too long, and neither begins nor ends with a space."""
    if not isinstance(text, str):
        raise TypeError(f"a {what} is text, got {type(text).__name__}")
    if not 0 < len(text) <= longest or not text.isprintable() or text != text.strip():
        raise ValueError(f"a {what} is printable text of 1 to {longest} letters, not padded, got {_shown(text)}")
    return text


def _shown(text: str) -> str:
    short = text if len(text) <= 60 else text[:57] + "…"
    return repr(short) if short.isprintable() else ascii(short)


def check_tags(tags: Iterable[str] | str) -> tuple[str, ...]:
    """Return the tags in order, each once; a string is one tag."""
    return tuple(dict.fromkeys(check_name(tag, "tag") for tag in ([tags] if isinstance(tags, str) else tags)))


def check_filters(tag: Filter = None, architecture: Filter = None, task: Filter = None) -> dict[str, list[str]]:
    """Return a list of strings for each filter that is not empty."""
    filters = {}
    for name, value in (("tag", tag), ("architecture", architecture), ("task", task)):
        texts = [] if value is None else [value] if isinstance(value, str) else list(value)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{name}= is text or a list of texts, got {value!r}")
        if len(texts) > MOST_TEXTS:
            raise ValueError(f"{name}= has {len(texts):,} texts; {MOST_TEXTS} at most")
        if texts:
            filters[name] = texts
    return filters


def _condition(filters: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    """Return SQL on `models` and its values: a model has every tag, and one of the architectures and of the tasks."""
    parts, values = ["models.removed IS NULL"], list[str]()
    for name, texts in filters.items():
        if name == "tag":
            parts += ["EXISTS (SELECT 1 FROM tags WHERE tags.model = models.id AND tags.tag = ?)"] * len(texts)
        else:
            parts.append(f"models.{name} IN ({', '.join('?' * len(texts))})")
        values += texts
    return " AND ".join(parts), values


# What the store keeps of a model


@dataclass(frozen=True, eq=False)
class Facts:
    """What the user records about a model; None: unknown."""

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Record(Facts):
    """A model as the store keeps it."""

    name: str
    digest: str  # of the weights
    architecture: str
    parameters: int
    blocks: dict[str, tuple[Floats, tuple[str, ...]]] = field(repr=False)  # by kind: (sites, width), and the sites
    absent: dict[str, str] = field(default_factory=dict)  # kinds that it lacks, with the reason
    about: dict[str, Any] = field(default_factory=dict)  # facts of the fingerprint: JSON
    id: int = 0  # of a model that was read
    added: str = ""  # when; "" of a new model: now

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.name)
        check_text(self.digest, "digest")
        check_text(self.architecture, "architecture")
        whole_number(self.parameters, f"the number of parameters of {self.name!r}", least=0, most=2**63 - 1)
        try:
            json.dumps([self.absent, self.about, *(labels for _, labels in self.blocks.values())], **JSON).encode()
        except (ValueError, TypeError, RecursionError) as error:  # half a character; numbers that JSON does not have
            raise ValueError(f"{self.name!r}: its facts cannot be stored as JSON: {error}") from error
        for vectors, labels in self.blocks.values():
            if vectors.dtype != np.float32 or vectors.ndim != 2 or not vectors.size or len(labels) != len(vectors):
                raise ValueError(f"need float32 (sites, width): {vectors.dtype} {vectors.shape}, {len(labels)} sites")
            if not np.isfinite(vectors).all():
                raise ValueError("vectors with values that are not finite")


JSON: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}
FORMAT = "sosie-zoo"
VERSION = 1
# A model exists when a row of `models` says so; `blocks` says where its vectors lie. Removed models keep their blocks
# until the zoo is compacted: a reader may still have them mapped, so their bytes must stay.
# Lists are filtered by `model_lists` alone: the rows of `models` are long, and read only for what is shown. A zoo made
# before there were indices of lists and parents gives the same answers, more slowly.
TABLES = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE files (
  id INTEGER PRIMARY KEY, kind TEXT NOT NULL, width INTEGER NOT NULL, name TEXT NOT NULL UNIQUE, UNIQUE (kind, width)
);
CREATE TABLE models (
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, digest TEXT NOT NULL, architecture TEXT NOT NULL,
  parameters INTEGER NOT NULL, task TEXT, source TEXT, parent TEXT, added TEXT NOT NULL, about TEXT NOT NULL,
  removed TEXT
);
CREATE UNIQUE INDEX model_names ON models (name) WHERE removed IS NULL;
CREATE INDEX model_architectures ON models (architecture) WHERE removed IS NULL;
CREATE INDEX model_tasks ON models (task) WHERE removed IS NULL;
CREATE INDEX model_digests ON models (digest) WHERE removed IS NULL;
CREATE INDEX model_parents ON models (parent) WHERE removed IS NULL;
CREATE INDEX model_lists ON models (id, name, architecture, task, removed) WHERE removed IS NULL;
CREATE TABLE blocks (
  model INTEGER NOT NULL REFERENCES models (id), file INTEGER NOT NULL REFERENCES files (id), first INTEGER NOT NULL,
  rows INTEGER NOT NULL, checksum BLOB NOT NULL, labels TEXT NOT NULL, PRIMARY KEY (model, file)
) WITHOUT ROWID;
CREATE UNIQUE INDEX block_places ON blocks (file, first);
CREATE TABLE tags (
  model INTEGER NOT NULL REFERENCES models (id), tag TEXT NOT NULL, PRIMARY KEY (model, tag)
) WITHOUT ROWID;
CREATE INDEX tag_models ON tags (tag, model);
CREATE TABLE failed (name TEXT PRIMARY KEY, reason TEXT NOT NULL, source TEXT, at TEXT NOT NULL) WITHOUT ROWID;
"""
TAGS = "(SELECT json_group_array(tag) FROM (SELECT tag FROM tags WHERE model = models.id ORDER BY tag)) AS tags"
NOTES = "CASE WHEN json_valid(about) THEN json_quote(json_extract(about, '$.about.notes')) ELSE 'null' END AS notes"
SHORT = f"id, name, architecture, task, parent, {TAGS}"  # what lists and pages show of a model
GIVEN = "IN (SELECT value FROM json_each(?))"  # any number of values, given as one JSON list
CHOICES = {
    "tags": "SELECT tag AS name, count(*) AS count FROM tags JOIN models ON models.id = tags.model "
    "WHERE removed IS NULL GROUP BY tag",
    "architectures": "SELECT architecture AS name, count(*) AS count FROM models WHERE removed IS NULL "
    "GROUP BY architecture",
    "tasks": "SELECT task AS name, count(*) AS count FROM models WHERE removed IS NULL AND task IS NOT NULL "
    "GROUP BY task",
}
END = "coalesce((SELECT first + rows FROM blocks WHERE file = files.id ORDER BY first DESC LIMIT 1), 0) AS end"  # rows
PAUSE = 0.02  # seconds between two tries to write
MOST_CHOICES = 200  # of tags, architectures and tasks each
MOST_RELATED = 100
TRIES = 5  # of a reader whose files are compacted away meanwhile
MOST_KEPT = 16  # vectors by kind and filters, cached between questions: 24 bytes per model each


class Store:
    """A folder with a database and files of vectors; safe to use from several threads, and after a fork."""

    def __init__(self, folder: Path, wait: float) -> None:
        self.folder, self.wait = folder, wait
        self.path = folder / "zoo.sqlite"
        self._local = threading.local()  # a connection for each thread
        self._file: tuple[int, int] | None = None  # the database that was first opened
        self._verified: dict[str, Any] = {}  # by file, see `Vectors`
        self._sound = False  # whether SQLite has found its file consistent
        self._lock = threading.Lock()  # of the above
        self._last_change = -1
        self._vectors_at = lru_cache(MOST_KEPT)(self._vectors_at_change)

    @classmethod
    def create(cls, folder: Path, about: Mapping[str, Any], wait: float) -> Store:
        """Make a store in a folder that is empty but for the probe set."""
        store = cls(folder, wait)
        (folder / "vectors").mkdir()
        rows = {"format": FORMAT, "version": VERSION, "changes": 0, **about}
        with errors_in_words(store.path):
            connection = store._connect("mode=rwc")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {TABLES} COMMIT;")
            connection.executemany(
                "INSERT INTO about VALUES (?, ?)", [(key, json.dumps(value)) for key, value in rows.items()]
            )
            connection.close()
        sync_folder(folder)
        return store

    # Connections and transactions

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection of this thread; one must not be carried over a fork."""
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            raise ZooGone(f"no file {self.path}: the zoo was moved or deleted") from None
        # Rows go to files by name: with another zoo under that name they would end up among its rows.
        if self._file is None:
            self._file = facts.st_dev, facts.st_ino
        elif self._file != (facts.st_dev, facts.st_ino):
            raise ZooGone(f"{self.folder} was replaced by another zoo since it was opened: open it again")
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None or self._local.pid != os.getpid():
            with errors_in_words(self.path, self.wait):
                connection = self._open()
            self._local.connection, self._local.pid = connection, os.getpid()
        return connection

    def _open(self) -> sqlite3.Connection:
        try:
            connection = self._connect("mode=rw")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return connection
        except sqlite3.OperationalError:
            if os.access(self.folder, os.W_OK):
                raise
            log = self.path.with_name(f"{self.path.name}-wal")
            if log.exists() and log.stat().st_size:
                raise PermissionError(
                    f"{self.folder} is read-only, and its last changes are still in {log.name}: open it once where it "
                    "can be written to"
                ) from None
            return self._connect("mode=ro&immutable=1")  # nobody can write to the folder while it is read

    def _connect(self, mode: str) -> sqlite3.Connection:
        address = f"file:{quote(str(self.path.absolute()))}?{mode}"
        connection = sqlite3.connect(address, uri=True, timeout=self.wait, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = FULL")  # committed changes survive a power cut
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        return connection

    def close(self) -> None:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is not None and self._local.pid == os.getpid():
            connection.close()
        self._local = threading.local()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction in which everything read is of one moment."""
        connection = self.connection
        if connection.in_transaction:
            yield connection
            return
        with errors_in_words(self.path, self.wait):
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                if connection.in_transaction:  # SQLite ends it where the file is damaged
                    connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction in which everything is written, or nothing; other writers wait until it ends."""
        connection = self.connection
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(f"{self.folder} cannot be written to: it is read-only")
        with errors_in_words(self.path, self.wait):
            self._begin(connection)
            try:
                yield connection
                connection.execute("UPDATE about SET value = CAST(value AS INTEGER) + 1 WHERE key = 'changes'")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # else the commit was done when an interruption came
                    connection.execute("ROLLBACK")
                raise

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Begin to write, or wait for another writer; SQLite's own waiting cannot be interrupted."""
        deadline = time.monotonic() + self.wait
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            while True:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                        raise
                time.sleep(PAUSE)
        finally:
            connection.execute(f"PRAGMA busy_timeout = {round(1000 * self.wait)}")

    def select(self, text: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of a query, with the JSON of labels, tags, kinds, notes and about parsed."""
        with self.reading() as connection:
            rows = [dict(row) for row in connection.execute(text, values)]
        for row in rows:
            for column in row.keys() & {"labels", "tags", "kinds", "notes", "about"}:
                row[column] = _parsed(row[column])
        return rows

    def about(self) -> dict[str, Any]:
        """Return the settings; raise if this is not a zoo, or one of a newer sosie."""
        try:
            with reading(self.path), self.reading() as connection:
                settings = {row["key"]: json.loads(row["value"]) for row in connection.execute("SELECT * FROM about")}
        except sqlite3.OperationalError as error:
            raise DamagedFile(f"{self.path} is a database, but not that of a zoo ({error})") from error
        if settings.get("format") != FORMAT:
            raise DamagedFile(f"{self.path} is a database, but not that of a zoo")
        version = settings.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise DamagedFile(f"{self.path} was written by a newer sosie (format {version}): upgrade sosie")
        return settings

    def changes(self) -> int:
        """Return a counter that goes up with every change: what is cached under another one is out of date."""
        with errors_in_words(self.path, self.wait):
            row = self.connection.execute("SELECT value FROM about WHERE key = 'changes'").fetchone()
        return int(row[0])

    # Models

    def find(self, name: str, columns: str = "id") -> dict[str, Any] | None:
        """Return these columns of a model; None if no model has that name."""
        rows = self.select(f"SELECT {columns} FROM models WHERE name = ? AND removed IS NULL", (name,))
        return rows[0] if rows else None

    def id_of(self, name: str) -> int:
        model = self.find(check_name(name))
        if model is None:
            names = self.select("SELECT name FROM models WHERE removed IS NULL LIMIT 5000")
            raise UnknownModel(f"no model {name!r} in {self.folder}{nearest(name, [row['name'] for row in names])}")
        return int(model["id"])

    def count(self) -> int:
        return int(self.select("SELECT count(*) AS count FROM models WHERE removed IS NULL")[0]["count"])

    def names(self) -> list[str]:
        """Return the names in the order the models were added."""
        return [row["name"] for row in self.select("SELECT name FROM models WHERE removed IS NULL ORDER BY id")]

    def failures(self) -> list[dict[str, Any]]:
        return self.select("SELECT * FROM failed ORDER BY at, name")

    def rows(self, limit: int | None = None, offset: int = 0, **filters: Sequence[str]) -> list[dict[str, Any]]:
        """Return a dict for each model, in the order they were added."""
        condition, values = _condition(filters)
        text = f"""
          SELECT id, name, architecture, parameters, task, source, parent, added, digest, {TAGS}, {NOTES},
            (SELECT json_group_object(files.kind, blocks.rows) FROM blocks JOIN files ON files.id = blocks.file
             WHERE blocks.model = models.id) AS kinds
          FROM models WHERE {condition} ORDER BY id LIMIT ? OFFSET ?"""
        return self.select(text, (*values, -1 if limit is None else limit, offset))

    def page(self, limit: int, offset: int, text: str | None = None, **filters: Sequence[str]) -> dict[str, Any]:
        """Return some models in the order they were added, and the count of all; `text` is a part of a name."""
        condition, values = _condition(filters)
        if text:
            condition += " AND models.name LIKE ? ESCAPE '\\'"
            escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            values.append(f"%{escaped}%")
        with self.reading() as connection:
            rows = self.select(
                f"SELECT {SHORT}, parameters, added FROM models WHERE id IN "
                f"(SELECT id FROM models WHERE {condition} ORDER BY id LIMIT ? OFFSET ?) ORDER BY id",
                (*values, limit, offset),
            )
            total = offset + len(rows)
            if len(rows) == limit or (offset and not rows):  # else this is the last page
                total = connection.execute(f"SELECT count(*) FROM models WHERE {condition}", values).fetchone()[0]
        return {"total": total, "offset": offset, "rows": rows}

    def short_facts(self, column: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Return name, architecture, task, tags and parent of models by "id" or "name", without removed ones."""
        text = f"SELECT {SHORT} FROM models WHERE removed IS NULL AND {column} {GIVEN}"
        return self.select(text, (json.dumps(values),))

    def describe(self, ids: Sequence[int], kind: str) -> dict[int, dict[str, Any]]:
        """Return the facts of models by id, with their sites of a kind."""
        text = f"""
          SELECT models.id, models.name, architecture, parameters, task, parent, source, digest, blocks.labels, {TAGS}
          FROM models JOIN blocks ON blocks.model = models.id JOIN files ON files.id = blocks.file
          WHERE files.kind = ? AND models.id {GIVEN}"""
        return {row["id"]: row for row in self.select(text, (kind, json.dumps(ids)))}

    def same_digests(self, kind: str, **filters: Sequence[str]) -> list[tuple[int, str]]:
        """Return id and digest of the models of a kind that share their weights with others, in the order of rows."""
        condition, values = _condition(filters)
        text = f"""
          SELECT models.id, models.digest FROM models
          JOIN blocks ON blocks.model = models.id JOIN files ON files.id = blocks.file
          WHERE files.kind = ? AND {condition} AND models.digest IN (
            SELECT digest FROM models WHERE removed IS NULL AND digest != 'unknown' GROUP BY digest HAVING count(*) > 1)
          ORDER BY blocks.first"""
        return [(row["id"], row["digest"]) for row in self.select(text, (kind, *values))]

    def related(self, name: str, parent: str | None) -> list[tuple[str, str]]:
        """Return the recorded children of a model and of its parent, each with its parent."""
        text = "SELECT name, parent FROM models WHERE removed IS NULL AND parent IN (?, ?) ORDER BY id"
        return [(row["name"], row["parent"]) for row in self.select(text, (name, parent))]

    def relatives(self, model: int) -> dict[str, list[dict[str, Any]]]:
        """Return the recorded parent and children of a model, and the models with the same weights."""
        (me,) = self.select("SELECT name, parent, digest FROM models WHERE id = ?", (model,))
        columns = "SELECT id, name FROM models WHERE removed IS NULL AND"
        same = f"{columns} digest = ? AND digest != 'unknown' AND id != ? ORDER BY id LIMIT ?"
        return {
            "parents": self.select(f"{columns} name = ?", (me["parent"],)),
            "children": self.select(f"{columns} parent = ? ORDER BY id LIMIT ?", (me["name"], MOST_RELATED)),
            "same_weights": self.select(same, (me["digest"], model, MOST_RELATED)),
        }

    def sites(self, model: int) -> dict[str, list[str]]:
        """Return the sites of each kind of vectors that a model has."""
        text = "SELECT kind, labels FROM blocks JOIN files ON files.id = file WHERE model = ? ORDER BY files.id"
        return {row["kind"]: row["labels"] for row in self.select(text, (model,))}

    def choices(self) -> dict[str, list[dict[str, Any]]]:
        """Return tags, architectures and tasks with their counts of models, the most frequent first."""
        order = "ORDER BY count DESC, name LIMIT ?"
        with self.reading():
            return {what: self.select(f"{text} {order}", (MOST_CHOICES,)) for what, text in CHOICES.items()}

    def why_none(self, filters: Mapping[str, Sequence[str]]) -> str | None:
        """Say which filter no model passes, and what would pass; None if some model passes all filters."""
        if self.rows(1, 0, **filters):
            return None
        # Every tag must be there, but only one of the architectures and of the tasks.
        wanted: list[tuple[str, Sequence[str]]] = [("tag", [tag]) for tag in filters.get("tag", [])]
        wanted += [(what, filters[what]) for what in ("architecture", "task") if what in filters]
        named = [f"the {what} {' or '.join(map(repr, texts))}" for what, texts in wanted]
        for text, (what, texts) in zip(named, wanted, strict=True):
            if not self.rows(1, 0, **{what: texts}):
                known = [row["name"] for row in self.choices()[f"{what}s"]]
                ordered = dict.fromkeys([*get_close_matches(texts[0], known, n=3), *known])
                return f"no model has {text}; " + (f"there are {listed(ordered, 8)}" if known else f"none has a {what}")
        return f"no model has {' and '.join(named)}"

    # Vectors

    def files(self) -> dict[str, str]:
        """Return the file of each kind of vectors; `compact` gives a kind a new one."""
        return {row["kind"]: row["name"] for row in self.select("SELECT kind, name FROM files ORDER BY id")}

    def kinds(self) -> list[str]:
        return list(self.files())

    def read(self, name: str | int, kinds: Sequence[str] | None = None) -> Record:
        """Return a model by name or id, with its vectors of these kinds (None: all), verified by their checksums."""
        return self.again(lambda: self._read(name, kinds))

    def _read(self, name: str | int, kinds: Sequence[str] | None) -> Record:
        with self.reading():
            model = name if isinstance(name, int) else self.id_of(name)
            columns = "id, name, digest, architecture, parameters, task, source, parent, added, about"
            rows = self.select(f"SELECT {columns}, {TAGS} FROM models WHERE id = ?", (model,))
            if not rows:
                raise UnknownModel(f"the model {name} of {self.folder} was removed meanwhile")
            places = self.select(
                "SELECT kind, width, name, first, rows, checksum, labels FROM blocks JOIN files ON files.id = file "
                "WHERE model = ? ORDER BY files.id",
                (model,),
            )
        (row,) = rows
        blocks = {}
        for place in places:
            if kinds is None or place["kind"] in kinds:
                path = path_of(self.folder, place["name"])
                vectors = read_rows(path, place["first"], place["rows"], place["width"])
                if checksum(vectors) != place["checksum"]:
                    raise changed(path, repr(row["name"]))
                blocks[place["kind"]] = vectors, tuple(place["labels"])
        with reading(self.path):
            about = row.pop("about")
            return Record(**row, blocks=blocks, absent=about["absent"], about=about["about"])

    def vectors(self, kind: str, **filters: Sequence[str]) -> Vectors:
        """Return the mapped rows of a kind, and where those of the models that pass the filters lie."""
        changes = self.changes()
        if changes != self._last_change:
            self._vectors_at.cache_clear()  # free what will not be asked for again
            self._last_change = changes
        return self._vectors_at(changes, kind, tuple((name, tuple(texts)) for name, texts in filters.items()))

    def _vectors_at_change(self, _: int, kind: str, filters: tuple[tuple[str, tuple[str, ...]], ...]) -> Vectors:
        return self.again(lambda: self.read_vectors(kind, **dict(filters)))

    def read_vectors(self, kind: str, **filters: Sequence[str]) -> Vectors:
        condition, values = _condition(filters)
        with self.reading() as connection:
            self._check_indices(connection)
            file = connection.execute("SELECT id, width, name FROM files WHERE kind = ?", (kind,)).fetchone()
            if file is None:
                there = ", ".join(self.files()) or "none yet"
                raise UnknownModel(f"no vectors of kind {kind!r} in {self.folder}; there are {there}")
            blocks = connection.execute(
                "SELECT blocks.model, blocks.first, blocks.rows, blocks.checksum "
                "FROM blocks JOIN models ON models.id = blocks.model "
                f"WHERE blocks.file = ? AND {condition} ORDER BY blocks.first",
                (file["id"], *values),
            ).fetchall()
        spans = np.array([tuple(block)[:3] for block in blocks], np.int64).reshape(-1, 3)
        sums = np.array([block[3] for block in blocks], object)
        end = int(spans[-1, 1] + spans[-1, 2]) if len(spans) else 0
        rows = map_rows(path_of(self.folder, file["name"]), end, file["width"])
        models, first, count = (np.ascontiguousarray(column) for column in spans.T)
        with self._lock:
            verified = self._verified.get(file["name"], np.zeros(0, bool))
            if len(verified) < end:
                verified = np.concatenate([verified, np.zeros(2 * end - len(verified), bool)])
                self._verified[file["name"]] = verified
        return Vectors(kind, rows, models, first, count, sums, verified)

    def _check_indices(self, connection: sqlite3.Connection) -> None:
        """Raise if an index disagrees with its table, once: a search would miss models. 0.2 s for 60,000 models."""
        if not self._sound:
            ((found, *_),) = connection.execute("PRAGMA integrity_check(1)").fetchall()
            if found != "ok":
                raise DamagedFile(
                    f"{self.path} is damaged ({found}): restore the folder from a copy, or import an exported file"
                )
            self._sound = True

    def exact(self) -> Vectors | None:
        """Return the whole vectors, if models have some."""
        return self.vectors("exact") if "exact" in self.kinds() else None

    def again(self, read: Callable[[], T]) -> T:
        """Return what `read` returns, called again when `compact` removed a file between two of its steps."""
        for _ in range(TRIES - 1):
            with contextlib.suppress(FileNotFoundError):
                return read()
        try:
            return read()
        except FileNotFoundError as error:
            raise DamagedFile(f"{error.filename} is gone, but models have their vectors in it. {REPAIR}") from error

    # Changes

    def append(self, records: Sequence[Record], *, replace: bool = False) -> list[bool | NameTaken]:
        """Write models in one transaction; return for each whether it is new.

        A model that is there, modules and sites included, only takes the new facts. If another model has its name, it
        takes that model's place with `replace`; otherwise it is not written, and the error is returned.
        """
        if len({record.name for record in records}) < len(records):
            raise ValueError("a name more than once among the models to add")
        outcomes: list[bool | NameTaken] = []
        with self.writing() as connection:
            present = [self.find(record.name, "id, digest, about") for record in records]
            for record, model in zip(records, present, strict=True):
                other = None if model is None or replace else self._difference(model, record)
                if other is None:
                    outcomes.append(model is None or replace)
                    continue
                outcomes.append(
                    NameTaken(
                        f"{record.name!r} is in the zoo with {other}: add it under another name, or with replace=True "
                        "(--replace) in place of the old one"
                    )
                )
            new = [record for record, outcome in zip(records, outcomes, strict=True) if outcome is True]
            places = self._append_rows(connection, new)
            for record, model, outcome in zip(records, present, outcomes, strict=True):
                if outcome is False and model is not None:
                    _update(connection, model["id"], record)
                elif outcome is True:
                    if model is not None:
                        remove(connection, model["id"], "replaced")
                    insert(connection, record, places)
        return outcomes

    def _difference(self, model: Mapping[str, Any], record: Record) -> str | None:
        """Return how a model that `find` gave differs from a record; None if it does not."""
        if model["digest"] != record.digest:
            return f"other weights ({model['digest']}, these are {record.digest})"
        before, now = (about.get("modules") for about in (model["about"]["about"], record.about))
        if before is not None and now is not None and before != now:  # older zoos did not keep it
            return "the same weights but other modules or other settings of them, such as another activation function"
        blocks = "SELECT kind, labels FROM blocks JOIN files ON files.id = file WHERE model = ?"
        for row in self.select(blocks, (model["id"],)):
            _, sites = record.blocks.get(row["kind"], (None, None))
            if sites is not None and sites != tuple(row["labels"]):
                return f"other sites ({listed(row['labels'])}; these are {listed(sites)})"
        return None

    def _append_rows(self, connection: sqlite3.Connection, records: Sequence[Record]) -> Places:
        """Append the vectors of models to the files of their kinds."""
        files: dict[tuple[str, int], list[tuple[str, Floats]]] = {}
        for record in records:
            for kind, (vectors, _) in record.blocks.items():
                files.setdefault((kind, vectors.shape[1]), []).append((record.name, vectors))
        places: Places = {}
        for (kind, width), arrays in files.items():
            new = kind, width, file_name(kind, width)
            connection.execute("INSERT OR IGNORE INTO files (kind, width, name) VALUES (?, ?, ?)", new)
            (file,) = self.select(f"SELECT id, name, {END} FROM files WHERE kind = ? AND width = ?", (kind, width))
            end = file["end"]
            write_rows(path_of(self.folder, file["name"]), end * width * ITEM, [vectors for _, vectors in arrays])
            for model, vectors in arrays:
                places[model, kind] = file["id"], end
                end += len(vectors)
        return places

    def remove(self, names: Sequence[str]) -> None:
        """Mark models as removed, all or none, and forget failed ones; `compact` frees their space."""
        with self.writing() as connection:
            for name in names:
                if not connection.execute("DELETE FROM failed WHERE name = ?", (name,)).rowcount:
                    remove(connection, self.id_of(name), "removed")

    def change_facts(self, name: str, facts: Facts, drop: Sequence[str] = ()) -> None:
        with self.writing() as connection:
            _update(connection, self.id_of(name), facts, drop)

    def record_failure(self, name: str, reason: str, source: str | None) -> None:
        with self.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO failed VALUES (?, ?, ?, ?)", (name, reason, source, _now()))


def insert(connection: sqlite3.Connection, record: Record, places: Places) -> None:
    """Insert a model whose rows are written."""
    about = json.dumps({"absent": record.absent, "about": record.about}, **JSON)
    model = connection.execute(
        "INSERT INTO models (name, digest, architecture, parameters, task, source, parent, added, about) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (record.name, record.digest, record.architecture, record.parameters, record.task, record.source,
         record.parent, record.added or _now(), about),
    ).lastrowid  # fmt: skip
    for kind, (vectors, labels) in record.blocks.items():
        place = places[record.name, kind]
        row = (model, *place, len(labels), checksum(vectors), json.dumps(labels, **JSON))
        connection.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)", row)
    connection.executemany("INSERT INTO tags VALUES (?, ?)", [(model, tag) for tag in record.tags])
    connection.execute("DELETE FROM failed WHERE name = ?", (record.name,))


def _update(connection: sqlite3.Connection, model: int, facts: Facts, drop: Sequence[str] = ()) -> None:
    """Drop and add tags; replace the other facts that are not None."""
    connection.executemany("DELETE FROM tags WHERE model = ? AND tag = ?", [(model, tag) for tag in drop])
    connection.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", [(model, tag) for tag in facts.tags])
    for column in ("task", "source", "parent"):
        if (value := getattr(facts, column)) is not None:
            connection.execute(f"UPDATE models SET {column} = ? WHERE id = ?", (value, model))


def remove(connection: sqlite3.Connection, model: int, why: str) -> None:
    """Mark a model as removed; its blocks stay, since a reader may have them mapped."""
    connection.execute("UPDATE models SET removed = ? WHERE id = ?", (f"{_now()} {why}", model))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def notes_of(value: Any) -> list[str]:
    """Return the notes of a fingerprint as a list of short strings, whatever its file holds."""
    return [str(note)[:1000] for note in value[:100]] if isinstance(value, list) else []


def _parsed(text: Any) -> Any:
    """Return the value of JSON in the database."""
    try:
        return [] if text == "[]" else json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedFile(f"the zoo's database has {str(text)[:60]!r}, which is not JSON. {REPAIR}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that gets its name when it is full; if another process was faster, its folder stays."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists, and is not a zoo: name a new folder, or an empty one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes folders that only their owner can read
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / "zoo.sqlite").is_file():
                raise
        with contextlib.suppress(OSError):
            sync_folder(folder.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
