"""What can go wrong with the folder of a zoo, in words."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...results import DamagedFile


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
