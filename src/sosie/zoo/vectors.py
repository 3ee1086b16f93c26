"""Files of float32 rows that only grow: appended, synced, mapped."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import DamagedFile
from .database import NO_ROOM, REPAIR, DiskFull

Rows = NDArray[np.float32]
ITEM = 4  # bytes of a float32
_NAME = re.compile(r"(?:vectors/)?[a-z0-9][a-z0-9_.-]*\.f32")
EXACT = "exact"


def file_name(kind: str, width: int, generation: int = 0) -> str:
    """vectors/cka-512.f32, exact.f32; with a number in it once the zoo was compacted."""
    later = f".{generation}" if generation else ""
    plain = kind.replace(":", "-")
    return f"exact{later}.f32" if kind == EXACT else f"vectors/{plain}-{width}{later}.f32"


def generation_of(name: str) -> int:
    found = re.search(r"\.(\d{1,9})\.f32$", name)
    return int(found[1]) if found else 0


def placed(folder: Path, name: str) -> Path:
    """The file of that name, which never lies outside the folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise DamagedFile(f"the database of {folder} names the file {name!r}, which no zoo has")
    return folder / name


def as_bytes(rows: Rows) -> memoryview:
    """As they lie in a file."""
    return memoryview(np.ascontiguousarray(rows, "<f4")).cast("B")  # type: ignore[arg-type]


def checksum(rows: Rows) -> bytes:
    return hashlib.blake2b(as_bytes(rows), digest_size=16).digest()


def changed(path: Any, whose: str) -> DamagedFile:
    return DamagedFile(f"{path} has other bytes than were written for {whose}: it was changed. {REPAIR}")


class Verified:
    """Which blocks of a file were found to be as they were written, by their first rows; rows never change."""

    def __init__(self) -> None:
        self._done = np.zeros(0, bool)
        self._lock = threading.Lock()

    def missing(self, first: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the list those are that were not looked at."""
        known = self._done
        inside = first < len(known)
        return np.flatnonzero(~(inside & known[np.where(inside, first, 0)])) if len(known) else np.arange(len(first))

    def add(self, first: NDArray[np.int64]) -> None:
        with self._lock:
            lacking = int(first.max(initial=-1)) + 1 - len(self._done)
            if lacking > 0:
                self._done = np.concatenate([self._done, np.zeros(lacking + len(self._done), bool)])
            self._done[first] = True


def append_rows(path: Path, end: int, arrays: Sequence[Rows]) -> None:
    """Write rows from row `end` on and sync them.

    Whatever lies behind `end` is what somebody left who was killed: it is overwritten.
    """
    start = end * arrays[0].shape[1] * ITEM
    path.parent.mkdir(exist_ok=True)
    new = not path.exists()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if (size := os.fstat(handle).st_size) < start:
            raise lost(path, size, start)
        os.ftruncate(handle, start)
        os.lseek(handle, start, os.SEEK_SET)
        for array in arrays:
            write_all(handle, array)
        os.fsync(handle)
        if new:
            sync_folder(path.parent)
            sync_folder(path.parent.parent)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise no_room(path) from error
        raise
    finally:
        os.close(handle)


def cut_tail(path: Path, end: int, width: int) -> int:
    """Cut off what lies behind row `end`; how many bytes that was."""
    extra = path.stat().st_size - end * width * ITEM if path.exists() else 0
    if extra > 0:
        os.truncate(path, end * width * ITEM)
    return max(extra, 0)


def write_all(handle: int, array: Rows) -> None:
    left = as_bytes(array)
    while left:
        left = left[os.write(handle, left) :]


def sync_folder(folder: Path) -> None:
    """A new name outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mapped(path: Path, rows: int, width: int) -> Rows:
    """The first rows of a file, read from the disk as they are looked at; never past what was asked for."""
    if not rows:
        return np.empty((0, width), np.float32)
    if (size := path.stat().st_size) < rows * width * ITEM:
        raise lost(path, size, rows * width * ITEM)  # a map past the end would kill the process
    return np.memmap(path, "<f4", "r", 0, (rows, width))


def read_rows(path: Path, first: int, rows: int, width: int) -> Rows:
    """A copy of some rows."""
    with path.open("rb") as file:
        file.seek(first * width * ITEM)
        content = file.read(rows * width * ITEM)
    if len(content) < rows * width * ITEM:
        raise lost(path, path.stat().st_size, (first + rows) * width * ITEM)
    return np.frombuffer(content, "<f4").reshape(rows, width)


def lost(path: Path, size: int, wanted: int) -> DamagedFile:
    return DamagedFile(
        f"{path} has {size:,} bytes, but models in the zoo have theirs up to byte {wanted:,}: it was cut off. {REPAIR}"
    )


def no_room(path: Any) -> DiskFull:
    return DiskFull(f"no room left on the disk for {path}: make some and try again; the zoo is as it was")
