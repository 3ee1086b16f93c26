"""The vectors of a zoo: flat files of float32 rows that only grow, and how questions read the rows of one kind."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import DamagedFile

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]
ITEM = 4  # bytes of a float32
EXACT = "exact"  # the kind of the whole vectors; their cosine is debiased CKA
REPAIR = "zoo.check(repair=True), or `sosie zoo check FOLDER --repair`, drops what was lost and keeps the rest"
_NAME = re.compile(r"(?:vectors/)?[a-z0-9][a-z0-9_.-]*\.f32")


def file_name(kind: str, width: int, generation: int = 0) -> str:
    """Return vectors/cka-512.f32 or exact.f32, with the number of the compaction after the first."""
    later = f".{generation}" if generation else ""
    return f"exact{later}.f32" if kind == EXACT else f"vectors/{kind.replace(':', '-')}-{width}{later}.f32"


def generation_of(name: str) -> int:
    number = re.search(r"\.(\d{1,9})\.f32$", name)
    return int(number[1]) if number else 0


def path_of(folder: Path, name: Any) -> Path:
    """Return the path of a file, which never lies outside the folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise DamagedFile(f"the database of {folder} names the file {name!r}, which no zoo has")
    return folder / name


def as_bytes(rows: Floats) -> memoryview:
    """Return rows as they lie in a file."""
    return memoryview(np.ascontiguousarray(rows, "<f4")).cast("B")  # type: ignore[arg-type]


def checksum(rows: Floats) -> bytes:
    return hashlib.blake2b(as_bytes(rows), digest_size=16).digest()


def write_rows(path: Path, start: int, arrays: Iterable[Floats]) -> None:
    """Write rows from byte `start` on, over what a killed writer may have left there, and sync them."""
    path.parent.mkdir(exist_ok=True)
    new = not path.exists()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if (size := os.fstat(handle).st_size) < start:
            raise cut_off(path, size, start)
        os.ftruncate(handle, start)
        os.lseek(handle, start, os.SEEK_SET)
        try:
            for array in arrays:
                left = as_bytes(array)
                while left:
                    left = left[os.write(handle, left) :]
            os.fsync(handle)
        except BaseException:  # a full disk gets its room back
            os.ftruncate(handle, start)
            raise
    finally:
        os.close(handle)
    if new:
        sync_folder(path.parent)
        sync_folder(path.parent.parent)


def sync_folder(folder: Path) -> None:
    """Make a new name in the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def map_rows(path: Path, rows: int, width: int) -> Floats:
    """Return the first rows of a file, memory-mapped."""
    if not rows:
        return np.empty((0, width), np.float32)
    if (size := path.stat().st_size) < rows * width * ITEM:  # a map past the end would kill the process
        raise cut_off(path, size, rows * width * ITEM)
    return np.memmap(path, "<f4", "r", 0, (rows, width))


def read_rows(path: Path, first: int, rows: int, width: int) -> Floats:
    """Return a copy of some rows."""
    with path.open("rb") as file:
        file.seek(first * width * ITEM)
        content = file.read(rows * width * ITEM)
    if len(content) < rows * width * ITEM:
        raise cut_off(path, path.stat().st_size, (first + rows) * width * ITEM)
    return np.frombuffer(content, "<f4").reshape(rows, width)


def cut_off(path: Path, size: int, wanted: int) -> DamagedFile:
    return DamagedFile(
        f"{path} has {size:,} bytes, but models in the zoo have theirs up to byte {wanted:,}: it was cut off. {REPAIR}"
    )


def changed(path: Any, whose: str) -> DamagedFile:
    return DamagedFile(f"{path} has other bytes than were written for {whose}: it was changed. {REPAIR}")


@dataclass(frozen=True, eq=False)
class Vectors:
    """All rows of a kind, with those of removed models, and which rows belong to which model.

    Call `verify` for models before reading their rows.
    """

    kind: str
    rows: Floats  # (all rows, width), memory-mapped
    models: Whole  # ids, in the order of their rows, which is the order in which they were added
    first: Whole  # row of each
    count: Whole  # rows of each
    sums: NDArray[np.object_] | None = None  # checksum of each; None: the rows are not from a file
    verified: NDArray[np.bool_] | None = None  # by first row; shared by all readers of the file in this process

    @property
    def file(self) -> Path | None:
        name = getattr(self.rows, "filename", None)
        return None if name is None else Path(name)

    def verify(self, places: Any = slice(None)) -> None:
        """Compare the rows of these models with their checksums, once in a process."""
        if self.sums is None or self.verified is None:
            return
        first, count, sums, models = self.first[places], self.count[places], self.sums[places], self.models[places]
        rows = np.asarray(self.rows)
        if len(first) and first.min() < 0:
            raise changed(self.file or self.kind, f"model number {models[first.argmin()]}")
        for k in np.flatnonzero(~self.verified[first]):
            if checksum(rows[first[k] : first[k] + count[k]]) != sums[k]:
                raise changed(self.file or self.kind, f"model number {models[k]}")
        self.verified[first] = True

    def part(self, places: Any) -> Vectors:
        """Return some of the models, by their places, in the order of their rows."""
        sums = None if self.sums is None else self.sums[places]
        chosen = self.models[places], self.first[places], self.count[places]
        return Vectors(self.kind, self.rows, *chosen, sums, self.verified)

    def starts(self) -> Whole:
        """Return where the rows of each model would begin if no others lay between them."""
        return np.asarray(np.cumsum(self.count) - self.count)

    def row_numbers(self) -> Whole:
        """Return the row numbers of the models, in order."""
        return np.repeat(self.first - self.starts(), self.count) + np.arange(int(self.count.sum()))

    def owners(self, rows: Whole) -> Whole:
        """Return the place of the model that owns each row; −1 before the first."""
        return np.searchsorted(self.first, rows, side="right") - 1

    def has_rows(self, rows: Whole) -> NDArray[np.bool_]:
        """Return which of these rows belong to one of the models."""
        place = self.owners(rows)
        inside: NDArray[np.bool_] = (rows >= 0) & (place >= 0) & (rows - self.first[place] < self.count[place])
        return inside

    def places_of(self, ids: Whole) -> tuple[Whole, NDArray[np.bool_]]:
        """Return the places of models by id, and which of the models are present."""
        if not len(self.models):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        places: Whole = np.minimum(np.searchsorted(self.models, ids), len(self.models) - 1)
        return places, self.models[places] == ids

    def of_model(self, model: int) -> NDArray[np.float64] | None:
        """Return the vectors of one model, in float64; None if it has none."""
        (place,), (there,) = self.places_of(np.array([model]))
        if not there:
            return None
        self.verify([place])
        first = int(self.first[place])
        return np.asarray(self.rows[first : first + int(self.count[place])], np.float64)
