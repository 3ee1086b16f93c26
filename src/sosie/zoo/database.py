"""The metadata of a zoo in SQLite: the tables, a connection for each thread, and transactions."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..files import DamagedFile

# What can go wrong with the folder of a zoo, in words


class ZooBusy(TimeoutError):
    """Somebody else is writing."""


class ZooGone(OSError):
    """The folder that was opened is no longer there, or is another one now."""


class UnknownModel(KeyError, ValueError):
    """No model of that name."""

    def __str__(self) -> str:
        return str(self.args[0])


class DiskFull(OSError):
    """There is no room left; the zoo is as it was."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.errno = errno.ENOSPC


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REPAIR = "zoo.check(repair=True), or `sosie zoo check FOLDER --repair`, drops what was lost and keeps the rest"


_DAMAGE = ("Could not decode", "no such column", "malformed")  # bytes that were changed where SQLite does not look


def parsed(text: Any) -> Any:
    """JSON that the database holds."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedFile(
            f"the database of the zoo has {str(text)[:60]!r}, which is no JSON: it was changed. {REPAIR}"
        ) from error


@contextmanager
def told(path: Path) -> Iterator[None]:
    """SQLite's errors in words; any other passes."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise _in_words(error, path) from error


def _in_words(error: sqlite3.DatabaseError, path: Path) -> Exception:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return ZooBusy(
            f"{path} is locked by another program that has not let go of it: try again, or open the zoo with a "
            "longer wait (wait=, --wait)"
        )
    if code == sqlite3.SQLITE_FULL:
        return DiskFull(f"no room left on the disk for {path}: make some and try again; the zoo is as it was")
    if code == sqlite3.SQLITE_IOERR:  # a quota or a limit on the size of files ends here, too
        return OSError(
            f"{path} cannot be read or written ({error}): the disk may be full, over its quota, or failing; what was "
            "begun is undone"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or str(error).startswith(_DAMAGE):
        return DamagedFile(f"{path} is damaged ({error}): restore the folder from a copy, or import an exported file")
    if code == sqlite3.SQLITE_READONLY:
        return PermissionError(f"{path} cannot be written to: the folder or the file is read-only")
    if code == sqlite3.SQLITE_CANTOPEN:
        return PermissionError(f"{path} cannot be opened ({error})")
    return error


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


# One writer at a time: a lock on a file that says who holds it; the system lets go of it when that process ends

PAUSE = 0.02  # seconds between two tries


@contextmanager
def only_writer(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock, or wait up to so many seconds for it and then say who has it."""
    try:
        import fcntl
    except ImportError as error:  # pragma: no cover
        raise OSError("a zoo is written to under POSIX file locks, which this system lacks; reading works") from error
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError as error:
        raise PermissionError(f"{path.parent} cannot be written to: {error.strerror}") from error
    try:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ZooBusy(
                        f"{path.parent} is being written to by {_holder(path)}; waited {wait:g} s. Try again when it "
                        "is done, or open the zoo with a longer wait (wait=, --wait)"
                    ) from None
                time.sleep(PAUSE)
        _sign(handle)
        yield
    finally:
        os.close(handle)  # which lets go of the lock


def _sign(handle: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)


def _holder(path: Path) -> str:
    try:
        text = path.read_bytes()[:200].decode("utf-8", "replace").strip()
    except OSError:
        text = ""
    return text if text and text.isprintable() else "another process"
