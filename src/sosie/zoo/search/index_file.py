"""An index of the vectors of a kind, made by faiss and kept beside them; whoever reads it looks whether it fits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...results import DamagedFile, write_atomically
from ..store import Mapped
from ..store.vectors import Rows
from ..store.vectors import mapped as map_rows

FORMAT = "sosie-index"
VERSION = 2
MOST_HEAD = 10_000  # bytes of the line in front
SAMPLED = 64  # rows by which vectors are known again


@dataclass(frozen=True)
class Head:
    """What an index is of."""

    file: str  # of the vectors, which gets another name when the zoo is compacted
    rows: int  # of the file, from the first on, that it covers; those of removed models may be missing
    width: int
    lists: int
    trained: int  # rows that there were when the lists were made
    sample: str  # hash of some of the rows
    bytes: int
    hash: str  # of these facts and of the index itself


class NoFaiss(ImportError):
    """The extra is not installed."""


def load_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise NoFaiss("an index needs faiss: pip install 'sosie[zoo]'; searches work without, row by row") from error
    return faiss


def path_of(mapped: Mapped) -> Path | None:
    """Where the index of these vectors is, or would be: vectors/cka-512.faiss; None where there are no vectors."""
    name = file_of(mapped)
    if name is None:
        return None
    stem = f"{mapped.kind.replace(':', '-')}-{mapped.rows.shape[1]}"
    return name.with_name(f"{stem}.faiss")


def file_of(mapped: Mapped) -> Path | None:
    name = getattr(mapped.rows, "filename", None)
    return None if name is None else Path(name)


def sample_of(vectors: Rows) -> str:
    """A hash of some rows, the last among them: a file may have been restored and gone on otherwise."""
    some = np.unique(np.linspace(0, len(vectors) - 1, SAMPLED).astype(np.int64))
    return hashlib.blake2b(np.ascontiguousarray(vectors[some], "<f4").tobytes(), digest_size=16).hexdigest()


def write_index(path: Path, index: Any, mapped: Mapped, rows: int, trained: int) -> Head:
    file = file_of(mapped)
    assert file is not None
    content = load_faiss().serialize_index(index)
    head = Head(
        file.name,
        rows,
        mapped.rows.shape[1],
        index.nlist,
        trained,
        sample_of(mapped.rows[:rows]),
        content.nbytes,
        "",
    )
    head = replace(head, hash=_hash(head, content))

    def write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            out.write(json.dumps({"format": FORMAT, "version": VERSION, **asdict(head)}).encode() + b"\n")
            content.tofile(out)

    write_atomically(path, write)
    return head


def read_index(path: Path, mapped: Mapped) -> tuple[Head, Any]:
    """The index, if it is whole and of these vectors; else why not, as an error."""
    faiss = load_faiss()
    head, start = _read_head(path)
    file = file_of(mapped)
    if file is None or head.file != file.name:
        raise DamagedFile(f"{path.name} is of vectors that were compacted since")
    if head.width != mapped.rows.shape[1] or head.rows < 1:
        raise DamagedFile(
            f"{path.name} is of {head.rows:,} rows of {head.width}, the vectors have {mapped.rows.shape[1]}"
        )
    # Not the rows that are mapped: the last models may have been removed since.
    if sample_of(map_rows(file, head.rows, head.width)) != head.sample:
        raise DamagedFile(f"{path.name} is of other vectors than are there")
    content = np.memmap(path, np.uint8, "r", start)
    if content.nbytes != head.bytes or _hash(head, content.data) != head.hash:
        raise DamagedFile(f"{path.name} was cut off or changed")
    index = faiss.deserialize_index(content)
    if getattr(index, "nlist", None) != head.lists or index.d != head.width or index.ntotal > head.rows:
        raise DamagedFile(f"{path.name} is an index of another form")
    return head, index


def _hash(head: Head, content: Any) -> str:
    facts = json.dumps(asdict(replace(head, hash="")), sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16, key=hashlib.blake2b(facts).digest()).hexdigest()


def _read_head(path: Path) -> tuple[Head, int]:
    with path.open("rb") as file:
        line = file.readline(MOST_HEAD)
    try:
        found = json.loads(line)
        if found.pop("format") != FORMAT or found.pop("version") != VERSION:
            raise ValueError("another format")
        head = Head(**found)
        numbers = (head.rows, head.width, head.bytes, head.trained, head.lists)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise ValueError("numbers that are none")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path.name} does not begin as an index does ({error})") from error
    return head, len(line)
