"""Candidates through an index: which rows are worth a look. What they are worth is worked out from the rows."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...results import DamagedFile
from ..store import Mapped
from .index_file import Head, NoFaiss, load_faiss, path_of, read_index, write_index
from .plain import Floats, Whole

FEWEST_ROWS = 1000
TRAINING = 64  # rows a list is made from
BLOCK = 65536
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
    for start in range(0, len(new), BLOCK):
        some = new[start : start + BLOCK]
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
