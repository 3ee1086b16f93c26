"""The metadata of a zoo in SQLite: the tables, a connection for each thread, and transactions."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...results import DamagedFile
from .errors import ZooGone, told

FORMAT = "sosie-zoo"
VERSION = 1
# A model exists when a row of `models` says so; where its vectors lie is in `blocks`. Removed models keep their
# blocks until the zoo is compacted: a reader may still have them mapped, so that their bytes must stay.
# Lists are filtered by `model_lists` alone: the rows of `models` are long, and read only for what is shown. A zoo that
# was made before there were indices of lists and parents answers the same, slower.
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


class Database:
    """One file; connections are made when a thread, or a process that was forked, first asks."""

    def __init__(self, path: Path, wait: float) -> None:
        self.path, self.wait = path, wait
        self._own = threading.local()
        self._file: tuple[int, int] | None = None  # the one that was first opened

    @classmethod
    def create(cls, path: Path, about: dict[str, Any], wait: float) -> Database:
        made = cls(path, wait)
        with told(path):
            connection = made._connect(f"file:{_quoted(path)}?mode=rwc")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {TABLES} COMMIT;")
            rows = {"format": FORMAT, "version": VERSION, "changes": 0, **about}
            connection.executemany(
                "INSERT INTO about VALUES (?, ?)", [(key, json.dumps(value)) for key, value in rows.items()]
            )
            connection.close()
        return made

    @property
    def connection(self) -> sqlite3.Connection:
        """That of this thread; a connection must not be carried over a fork."""
        self._check_file()
        found: sqlite3.Connection | None = getattr(self._own, "connection", None)
        if found is None or self._own.pid != os.getpid():
            with told(self.path):
                found = self._opened()
            self._own.connection, self._own.pid = found, os.getpid()
        return found

    def _check_file(self) -> None:
        """Rows go to files by name: with another zoo under that name they would end up among its rows."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            raise ZooGone(f"no file {self.path}: the zoo was moved or deleted") from None
        if self._file is None:
            self._file = found.st_dev, found.st_ino
        elif self._file != (found.st_dev, found.st_ino):
            raise ZooGone(f"{self.path.parent} was replaced by another zoo since it was opened: open it again")

    def _opened(self) -> sqlite3.Connection:
        where = _quoted(self.path)
        try:
            connection = self._connect(f"file:{where}?mode=rw")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            if os.access(self.path.parent, os.W_OK):
                raise
            log = self.path.with_name(f"{self.path.name}-wal")
            if log.exists() and log.stat().st_size:
                raise PermissionError(
                    f"{self.path.parent} is read-only, and its last changes are still in {log.name}: open it once "
                    "where it can be written to"
                ) from None
            # Nobody can write to the folder, so nothing changes while it is read.
            connection = self._connect(f"file:{where}?mode=ro&immutable=1")
        return connection

    def _connect(self, address: str) -> sqlite3.Connection:
        connection = sqlite3.connect(address, uri=True, timeout=self.wait, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = FULL")  # what is committed outlives a power cut
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        return connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """All that is read inside is of one moment."""
        connection = self.connection
        if connection.in_transaction:
            yield connection
            return
        with told(self.path):
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """All that is written inside is there afterwards, or nothing of it."""
        connection = self.connection
        with told(self.path):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("UPDATE about SET value = CAST(value AS INTEGER) + 1 WHERE key = 'changes'")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def about(self) -> dict[str, Any]:
        """The settings; refused in words where this is no zoo, or one of a newer sosie."""
        try:
            with self.reading() as connection:
                found = {row["key"]: json.loads(row["value"]) for row in connection.execute("SELECT * FROM about")}
        except sqlite3.OperationalError as error:
            raise DamagedFile(f"{self.path} is a database, but not that of a zoo ({error})") from error
        except (ValueError, TypeError, IndexError, RecursionError) as error:
            if isinstance(error, DamagedFile):
                raise
            raise DamagedFile(f"{self.path} is damaged: {error}") from error
        if found.get("format") != FORMAT:
            raise DamagedFile(f"{self.path} is a database, but not that of a zoo")
        version = found.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise DamagedFile(f"{self.path} was written by a newer sosie (format {version}): upgrade sosie")
        return found

    def changes(self) -> int:
        """Goes up with every change, so that whoever keeps something knows when to read again."""
        with told(self.path):
            row = self.connection.execute("SELECT value FROM about WHERE key = 'changes'").fetchone()
        return int(row[0])

    def close(self) -> None:
        found: sqlite3.Connection | None = getattr(self._own, "connection", None)
        if found is not None and self._own.pid == os.getpid():
            found.close()
        self._own = threading.local()


def _quoted(path: Path) -> str:
    from urllib.parse import quote

    return quote(str(path.absolute()))
