"""Exact search: products of a few vectors with all rows of a file, a block at a time."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import DamagedFile, write_atomically
from .store import Mapped
from .vectors import Rows
from .vectors import mapped as map_rows

BLOCK = 4096  # rows at a time: 4 MiB at 256 numbers, so that memory does not grow with the zoo
WORTH = 8  # a view of a row costs nothing, a copy as much as a product: an eighth of a block is taken as it lies
STACK = 32  # rows of one small product, which BLAS does not copy into a layout of its own first: half of the time

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]


def blocks(mapped: Mapped, most: int = BLOCK) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Whole models, about `most` rows at a time: from which to which model, and their rows; a view where it can be."""
    ends = np.cumsum(mapped.count)
    gaps = (
        np.flatnonzero(mapped.first[1:] != (mapped.first + mapped.count)[:-1]) + 1
    )  # models that follow on others' rows
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
        gap = int(np.searchsorted(gaps, start, side="right"))
        if gap < len(gaps) and gaps[gap] < stop and WORTH * (int(ends[gaps[gap] - 1]) - before) >= most:
            stop = int(gaps[gap])
        mapped.verify(slice(start, stop))
        first, last = int(mapped.first[start]), int(mapped.first[stop - 1] + mapped.count[stop - 1])
        if last - first == int(ends[stop - 1]) - before:
            yield start, stop, np.asarray(mapped.rows[first:last])
        else:
            some = mapped.part(slice(start, stop))
            yield start, stop, np.asarray(mapped.rows[some.index()])
        start = stop


def score_models(query: Floats, mapped: Mapped, places: Whole | None = None, *, symmetric: bool = False) -> Floats:
    """For each model the mean over the query's sites of the best cosine among the model's.

    `symmetric`: and that the other way round, averaged. `places`: vectors meet only where the model's has this place
    among its own; −inf where none does.
    """
    found = np.empty(len(mapped.models), np.float32)
    turned = np.ascontiguousarray(query.T)
    for start, stop, rows in blocks(mapped):
        counts = mapped.count[start:stop]
        starts = np.cumsum(counts) - counts
        cosines = stacked(rows, turned)  # (rows, sites of the query)
        if places is not None:
            found[start:stop] = _at_places(cosines, starts, counts, places)
            continue
        scores = best_of_each(cosines, starts, counts).mean(1)
        if symmetric:
            scores = (scores + np.add.reduceat(cosines.max(1), starts) / counts) / 2
        found[start:stop] = scores
    return found


def stacked(rows: Floats, turned: Floats) -> Floats:
    """rows @ turned, for a few columns."""
    found = np.empty((len(rows), turned.shape[1]), np.float32)
    even = len(rows) - len(rows) % STACK
    shape = even // STACK, STACK, -1
    if even:
        np.matmul(rows[:even].reshape(shape), turned, out=found[:even].reshape(shape))
    np.matmul(rows[even:], turned, out=found[even:])
    return found


def best_of_each(cosines: Floats, starts: Whole, counts: Whole) -> Floats:
    """The largest of each model's rows: (models, sites of the query)."""
    if (counts == counts[0]).all():  # much the faster way where all have as many
        apart = cosines.reshape(len(counts), int(counts[0]), -1)
        best: Floats = apart[:, 0].copy()
        for k in range(1, apart.shape[1]):
            np.maximum(best, apart[:, k], out=best)
        return best
    found: Floats = np.maximum.reduceat(cosines, starts, axis=0)
    return found


def _at_places(cosines: Floats, starts: Whole, counts: Whole, places: Whole) -> Floats:
    there = places[None] < counts[:, None]
    rows = np.where(there, starts[:, None] + places[None], 0)
    picked = np.where(there, cosines[rows, np.arange(len(places))[None]], 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = picked.sum(1) / there.sum(1)
    return np.where(there.any(1), scores, -np.inf).astype(np.float32)


def nearest_rows(query: Floats, mapped: Mapped, k: int, places: Whole | None = None) -> tuple[Whole, Floats]:
    """For each vector of the query the `k` nearest rows, nearest first: (sites, k) row numbers, and cosines.

    Fewer where there are fewer; −inf, with row −1, where `places` leave fewer.
    """
    rows = np.empty((len(query), 0), np.int64)
    values = np.empty((len(query), 0), np.float32)
    turned = np.ascontiguousarray(query.T)
    for start, stop, some in blocks(mapped):
        part = mapped.part(slice(start, stop))
        numbers = part.index()
        cosines = np.ascontiguousarray(stacked(some, turned).T)
        if places is not None:
            place = numbers - np.repeat(part.first, part.count)
            cosines[places[:, None] != place[None]] = -np.inf
        if values.shape[1] == k:  # most blocks have few that are near enough
            near = np.flatnonzero((cosines > values[:, -1:]).any(0))
            numbers, cosines = numbers[near], cosines[:, near]
        rows, values = merge(rows, values, np.broadcast_to(numbers, cosines.shape), cosines, k)
    return np.where(np.isneginf(values), -1, rows), values


def merge(rows: Whole, values: Floats, more: Whole, cosines: Floats, k: int) -> tuple[Whole, Floats]:
    """The `k` largest of both, largest first."""
    rows, values = np.concatenate([rows, more], 1), np.concatenate([values, cosines], 1)
    if values.shape[1] > k:
        best = np.argpartition(-values, k - 1, axis=1)[:, :k]
        rows, values = np.take_along_axis(rows, best, 1), np.take_along_axis(values, best, 1)
    order = np.lexsort((rows, -values), axis=1)
    return np.take_along_axis(rows, order, 1), np.take_along_axis(values, order, 1)


# An index of the vectors of a kind, made by faiss and kept beside them; whoever reads it looks whether it fits

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


# Candidates through an index: which rows are worth a look. What they are worth is worked out from the rows

FEWEST_ROWS = 1000
TRAINING = 64  # rows a list is made from
INDEX_BLOCK = 65536
LISTS = (1 / 32, 32)  # gone through for a vector: this share, and not fewer than this
VOTING = 4  # vectors of which each may miss a model: half as many lists will do
MOST_LISTS = 4096


@dataclass(frozen=True, eq=False)
class Index:
    """Rows by their nearest of some centres, one byte a number; vectors that came later are not in it."""

    head: Head
    faiss: Any

    def candidates(self, query: Floats, mapped: Mapped, count: int) -> list[Whole]:
        """For each vector of the query about `count` rows of the models, the nearest in all likelihood."""
        faiss = load_faiss()
        covered = np.searchsorted(mapped.first, self.head.rows)
        live = int(mapped.count[:covered].sum())
        share, least = LISTS if len(query) < VOTING else (LISTS[0] / 2, LISTS[1] // 2)
        options = {"nprobe": min(max(int(self.head.lists * share), least), self.head.lists)}
        gone = self.faiss.ntotal - live  # of removed models, or left out by a filter
        if gone > self.faiss.ntotal // 10:
            marked = np.zeros(self.head.rows, bool)
            marked[mapped.part(slice(int(covered))).index()] = True
            bits = np.packbits(marked, bitorder="little")  # must outlive the search
            options["sel"] = faiss.IDSelectorBitmap(bits)
            gone = 0
        more = count + min(gone, count)
        _, rows = self.faiss.search(query, more, params=faiss.SearchParametersIVF(**options))
        return [one[belong(mapped, one)][:count] for one in rows]


def belong(mapped: Mapped, rows: Whole) -> NDArray[np.bool_]:
    """Which of these rows are of one of the models."""
    place = np.searchsorted(mapped.first, rows, side="right") - 1
    inside = rows - mapped.first[place] < mapped.count[place]
    found: NDArray[np.bool_] = (rows >= 0) & (place >= 0) & inside
    return found


class Indexes:
    """Those of a zoo, read when first asked for, and again when somebody has made another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Path, tuple[Any, Index | str]] = {}

    def of(self, mapped: Mapped) -> Index | str | None:
        """The index; None where there is none; where it is of no use, why."""
        path = path_of(mapped)
        if path is None or not path.is_file():
            return None
        stat = path.stat()
        mark = stat.st_ino, stat.st_mtime_ns, stat.st_size, getattr(mapped.rows, "filename", None)
        with self._lock:
            if path in self._kept and self._kept[path][0] == mark:
                return self._kept[path][1]
            try:
                found: Index | str = Index(*read_index(path, mapped))
            except (DamagedFile, NoFaiss, OSError, RuntimeError) as error:  # faiss raises the last
                found = str(error)
            self._kept[path] = mark, found
            return found


def build(mapped: Mapped, there: Index | str | None, *, lists: int | None = None) -> Head:
    """Make the index, or add to the one that is there the rows that came since."""
    faiss = load_faiss()
    rows = mapped.index()
    if len(rows) < FEWEST_ROWS:
        raise ValueError(f"{len(rows):,} rows of kind {mapped.kind!r}: an index is for {FEWEST_ROWS:,} and more")
    mapped.verify()
    end = int(rows[-1]) + 1
    path = path_of(mapped)
    assert path is not None
    if isinstance(there, Index) and lists is None and len(rows) <= 2 * there.head.trained:
        index = faiss.clone_index(there.faiss)  # others may be searching in this one
        new, trained = rows[np.searchsorted(rows, there.head.rows) :], there.head.trained
    else:
        index, new, trained = _trained(faiss, mapped, rows, lists), rows, len(rows)
    for start in range(0, len(new), INDEX_BLOCK):
        some = new[start : start + INDEX_BLOCK]
        index.add_with_ids(np.ascontiguousarray(mapped.rows[some], np.float32), some)
    return write_index(path, index, mapped, end, trained)


def _trained(faiss: Any, mapped: Mapped, rows: Whole, lists: int | None) -> Any:
    """Empty, its centres made from rows drawn evenly."""
    count = min(max(int(len(rows) ** 0.5), 16), MOST_LISTS) if lists is None else lists
    if not 1 <= count <= len(rows):
        raise ValueError(f"lists={lists!r}: from 1 to the number of rows, {len(rows):,}")
    index = faiss.index_factory(mapped.rows.shape[1], f"IVF{count},SQ8", faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # it would warn that small zoos are small
    some = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), TRAINING * count)).astype(np.int64))
    index.train(np.ascontiguousarray(mapped.rows[rows[some]], np.float32))
    return index
