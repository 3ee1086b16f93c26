"""The vectors of a zoo: flat files of float32 rows that only grow, and the rows of one kind as questions read them."""

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
EXACT = "exact"  # the kind of the whole vectors, whose cosine is debiased CKA
REPAIR = "zoo.check(repair=True), or `sosie zoo check FOLDER --repair`, drops what was lost and keeps the rest"
_NAME = re.compile(r"(?:vectors/)?[a-z0-9][a-z0-9_.-]*\.f32")


def file_name(kind: str, width: int, generation: int = 0) -> str:
    """vectors/cka-512.f32 or exact.f32, with a number in it once the zoo was compacted."""
    later = f".{generation}" if generation else ""
    return f"exact{later}.f32" if kind == EXACT else f"vectors/{kind.replace(':', '-')}-{width}{later}.f32"


def generation_of(name: str) -> int:
    number = re.search(r"\.(\d{1,9})\.f32$", name)
    return int(number[1]) if number else 0


def path_of(folder: Path, name: Any) -> Path:
    """The file of that name, which never lies outside the folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise DamagedFile(f"the database of {folder} names the file {name!r}, which no zoo has")
    return folder / name


def as_bytes(rows: Floats) -> memoryview:
    """Rows as they lie in a file."""
    return memoryview(np.ascontiguousarray(rows, "<f4")).cast("B")  # type: ignore[arg-type]


def checksum(rows: Floats) -> bytes:
    return hashlib.blake2b(as_bytes(rows), digest_size=16).digest()


def write_rows(path: Path, start: int, arrays: Iterable[Floats]) -> None:
    """Write rows from byte `start` on and sync them; bytes behind `start` are what a killed writer left: they go."""
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
    """A new name in the folder outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def map_rows(path: Path, rows: int, width: int) -> Floats:
    """The first rows of a file, read from the disk when they are looked at."""
    if not rows:
        return np.empty((0, width), np.float32)
    if (size := path.stat().st_size) < rows * width * ITEM:  # a map past the end would kill the process
        raise cut_off(path, size, rows * width * ITEM)
    return np.memmap(path, "<f4", "r", 0, (rows, width))


def read_rows(path: Path, first: int, rows: int, width: int) -> Floats:
    """A copy of some rows."""
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
    """All rows of a kind, those of removed models among them, and which of them belong to which model.

    Rows are verified when they are first read: whoever reads some calls `verify` for their models before.
    """

    kind: str
    rows: Floats  # (all rows, width), on the disk
    models: Whole  # ids, in the order of their rows, which is the order in which they were added
    first: Whole  # row of each
    count: Whole  # rows of each
    sums: NDArray[np.object_] | None = None  # checksum of each; None: the rows lie in no file
    verified: NDArray[np.bool_] | None = None  # by first row; shared by all that this process reads of the file

    @property
    def file(self) -> Path | None:
        name = getattr(self.rows, "filename", None)
        return None if name is None else Path(name)

    def verify(self, places: Any = slice(None)) -> None:
        """Compare the rows of these models with their checksums, unless that was done before in this process."""
        if self.sums is None or self.verified is None:
            return
        first, count, sums, models = self.first[places], self.count[places], self.sums[places], self.models[places]
        rows = np.asarray(self.rows)
        for k in np.flatnonzero(~self.verified[first]):
            if checksum(rows[first[k] : first[k] + count[k]]) != sums[k]:
                raise changed(self.file or self.kind, f"model number {models[k]}")
        self.verified[first] = True

    def part(self, places: Any) -> Vectors:
        """Some of the models, by their places, in the order of their rows."""
        sums = None if self.sums is None else self.sums[places]
        chosen = self.models[places], self.first[places], self.count[places]
        return Vectors(self.kind, self.rows, *chosen, sums, self.verified)

    def starts(self) -> Whole:
        """Where the rows of each model would begin if no others lay between them."""
        found: Whole = np.cumsum(self.count) - self.count
        return found

    def row_numbers(self) -> Whole:
        """The rows of the models, in order."""
        return np.repeat(self.first - self.starts(), self.count) + np.arange(int(self.count.sum()))

    def owners(self, rows: Whole) -> Whole:
        """Where among the models the owner of each row is; −1 before the first."""
        return np.searchsorted(self.first, rows, side="right") - 1

    def has_rows(self, rows: Whole) -> NDArray[np.bool_]:
        """Which of these rows belong to one of the models."""
        place = self.owners(rows)
        inside: NDArray[np.bool_] = (rows >= 0) & (place >= 0) & (rows - self.first[place] < self.count[place])
        return inside

    def places_of(self, ids: Whole) -> tuple[Whole, NDArray[np.bool_]]:
        """Where models are among these, and whether they are."""
        if not len(self.models):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        places: Whole = np.minimum(np.searchsorted(self.models, ids), len(self.models) - 1)
        return places, self.models[places] == ids

    def of_model(self, model: int) -> NDArray[np.float64] | None:
        """The vectors of one model, in float64; None if it has none."""
        (place,), (there,) = self.places_of(np.array([model]))
        if not there:
            return None
        self.verify([place])
        first = int(self.first[place])
        return np.asarray(self.rows[first : first + int(self.count[place])], np.float64)
