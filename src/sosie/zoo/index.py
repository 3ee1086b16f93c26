"""An index of the vectors of a kind, made by faiss and kept in a file beside them: it says which rows to look at.

Values are always computed from the vectors themselves. An index is used only if it fits them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import whole_number
from ..files import DamagedFile, check_schema, write_atomically
from .vectors import Floats, Vectors, Whole, map_rows

FORMAT, VERSION = "sosie-index", 2
MOST_HEAD = 10_000  # bytes of the first line
SAMPLED = 64  # rows that identify the vectors
FEWEST_ROWS = 1000
TRAINING = 64  # rows to make a list from
BLOCK = 65536  # rows added at a time
LISTS = (1 / 32, 32)  # searched for a vector: this share, and at least this many
VOTING = 4  # vectors: each may miss a model, so half as many lists suffice
MOST_LISTS = 4096
SCHEMA = {
    "format": str, "version": int, "file": str, "rows": int, "width": int, "lists": int, "trained": int,
    "sample": str, "bytes": int, "hash": str,
}  # fmt: skip
_reading = threading.Lock()


@dataclass(frozen=True, eq=False)
class Index:
    """Rows sorted by their nearest centre, one byte per number, without the vectors that were added later."""

    rows: int  # the first rows of the file of vectors, which it covers; those of removed models may be missing
    lists: int
    trained: int  # rows when the lists were made
    bytes: int
    faiss: Any

    def candidates(self, query: Floats, vectors: Vectors, count: int) -> list[Whole]:
        """Return for each vector of the query about `count` rows of the models, most likely the nearest."""
        faiss = load_faiss()
        covered = np.searchsorted(vectors.first, self.rows)
        live = int(vectors.count[:covered].sum())
        share, least = LISTS if len(query) < VOTING else (LISTS[0] / 2, LISTS[1] // 2)
        options = {"nprobe": min(max(int(self.lists * share), least), self.lists)}
        gone = self.faiss.ntotal - live  # rows of removed models, or excluded by a filter
        if gone > self.faiss.ntotal // 10:
            marked = np.zeros(self.rows, bool)
            marked[vectors.part(slice(int(covered))).row_numbers()] = True
            bits = np.packbits(marked, bitorder="little")  # must outlive the search
            options["sel"] = faiss.IDSelectorBitmap(bits)
            gone = 0
        more = count + min(gone, count)
        _, rows = self.faiss.search(query, more, params=faiss.SearchParametersIVF(**options))
        return [candidates[vectors.has_rows(candidates)][:count] for candidates in rows]


def load_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("an index needs faiss: pip install 'sosie[zoo]'; searches work without one") from error
    return faiss


def open_index(vectors: Vectors) -> Index | str | None:
    """Return the index of these vectors; None if there is none; the reason if it cannot be used."""
    if vectors.file is None or not (path := _path_of(vectors)).is_file():
        return None
    facts = path.stat()
    with _reading:
        return _opened(path, vectors.file, vectors.rows.shape[1], (facts.st_ino, facts.st_mtime_ns, facts.st_size))


@lru_cache(maxsize=4)
def _opened(path: Path, file: Path, width: int, _: tuple[int, int, int]) -> Index | str:
    """Return the index, cached until its file changes."""
    try:
        return read_index(path, file, width)
    except (DamagedFile, ImportError, OSError, RuntimeError) as error:  # faiss raises the last
        return str(error)


def _path_of(vectors: Vectors) -> Path:
    """Return vectors/cka-512.faiss, beside the vectors."""
    assert vectors.file is not None
    return vectors.file.with_name(f"{vectors.kind.replace(':', '-')}-{vectors.rows.shape[1]}.faiss")


def build(vectors: Vectors, *, lists: int | None = None) -> Index:
    """Make the index, or add the new rows to the existing one."""
    faiss = load_faiss()
    rows = vectors.row_numbers()
    if len(rows) < FEWEST_ROWS:
        raise ValueError(f"{len(rows):,} rows of kind {vectors.kind!r}: an index is for {FEWEST_ROWS:,} and more")
    vectors.verify()
    old = open_index(vectors)
    if isinstance(old, Index) and lists is None and len(rows) <= 2 * old.trained:
        index = faiss.clone_index(old.faiss)  # other threads may be searching in the old one
        new, trained = rows[np.searchsorted(rows, old.rows) :], old.trained
    else:
        count = min(max(int(len(rows) ** 0.5), 16), MOST_LISTS)
        count = count if lists is None else whole_number(lists, "lists", least=1, most=len(rows))
        index = faiss.index_factory(vectors.rows.shape[1], f"IVF{count},SQ8", faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1  # faiss would warn about small zoos
        some = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), TRAINING * count)).astype(np.int64))
        index.train(np.ascontiguousarray(vectors.rows[rows[some]], np.float32))
        new, trained = rows, len(rows)
    for start in range(0, len(new), BLOCK):
        some = new[start : start + BLOCK]
        index.add_with_ids(np.ascontiguousarray(vectors.rows[some], np.float32), some)
    return _write(vectors, index, int(rows[-1]) + 1, trained)


def _write(vectors: Vectors, index: Any, rows: int, trained: int) -> Index:
    assert vectors.file is not None
    content = load_faiss().serialize_index(index)
    head = {
        "file": vectors.file.name,  # `compact` gives it another name
        "rows": rows, "width": vectors.rows.shape[1], "lists": index.nlist, "trained": trained,
        "sample": _sample(vectors.rows[:rows]), "bytes": content.nbytes, "hash": "",
    }  # fmt: skip
    head["hash"] = _hash(head, content)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            out.write(json.dumps({"format": FORMAT, "version": VERSION, **head}).encode() + b"\n")
            content.tofile(out)

    write_atomically(_path_of(vectors), write)
    return Index(rows, index.nlist, trained, content.nbytes, index)


def read_index(path: Path, file: Path, width: int) -> Index:
    """Return the index; raise unless it is whole and of the vectors in `file`."""
    faiss = load_faiss()
    with path.open("rb") as opened:
        line = opened.readline(MOST_HEAD)
    try:
        head = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path.name} does not begin like an index ({error})") from error
    check_schema(path.name, head, SCHEMA)
    if (head.pop("format"), head.pop("version")) != (FORMAT, VERSION):
        raise DamagedFile(f"{path.name} does not begin like an index (another format)")
    if head["file"] != file.name:
        raise DamagedFile(f"{path.name} is of vectors that were compacted since")
    if head["width"] != width or head["rows"] < 1:
        raise DamagedFile(f"{path.name} is of {head['rows']:,} rows of {head['width']}, the vectors have {width}")
    # Sampled from the file, not from the mapped rows: the last models may have been removed since.
    if _sample(map_rows(file, head["rows"], width)) != head["sample"]:
        raise DamagedFile(f"{path.name} is of other vectors than those in {file.name}")
    content = np.memmap(path, np.uint8, "r", len(line))
    if content.nbytes != head["bytes"] or _hash(head, content.data) != head["hash"]:
        raise DamagedFile(f"{path.name} was cut off or changed")
    index = faiss.deserialize_index(content)
    if getattr(index, "nlist", None) != head["lists"] or index.d != width or index.ntotal > head["rows"]:
        raise DamagedFile(f"{path.name} is an index of another form")
    return Index(head["rows"], head["lists"], head["trained"], head["bytes"], index)


def _sample(rows: Floats) -> str:
    """Return a hash of some rows, with the last one: a file may have been restored and then continued differently."""
    some = np.unique(np.linspace(0, len(rows) - 1, SAMPLED).astype(np.int64))
    return hashlib.blake2b(np.ascontiguousarray(rows[some], "<f4").tobytes(), digest_size=16).hexdigest()


def _hash(head: dict[str, Any], content: Any) -> str:
    """Return the hash of the facts and of the index itself."""
    facts = json.dumps({**head, "hash": ""}, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16, key=hashlib.blake2b(facts).digest()).hexdigest()
