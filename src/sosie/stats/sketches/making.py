"""Making the sketch of one site as its rows appear: features on the way up, gradients on the way down."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...linalg import for_numpy
from ..lottery import Fold
from .hashes import Drawn
from .pairing import Pairing, Takes, blank
from .site import Part, SiteSketch
from .tensor_sketch import TensorSketch

MOMENT = 1024  # neurons up to which Σ g fᵀ is kept whole
PAIR_NUMBERS = 2**23  # numbers of each of f and g that are kept for pairs of rows
MOST_PAIRED, FEWEST_PAIRED = 512, 64  # rows that are kept for them


@dataclass(frozen=True)
class SiteForm:
    """How a site is sketched."""

    width: int
    size: int | None  # buckets; None: every row is kept
    parts: frozenset[str]
    seed: int = 0
    fold: int | None = None  # columns that its rows are projected to

    @property
    def columns(self) -> int:
        return self.width if self.fold is None else self.fold

    @property
    def paired_rows(self) -> int:
        return max(FEWEST_PAIRED, min(MOST_PAIRED, PAIR_NUMBERS // self.columns))

    def bytes(self, rows: int | None) -> int:
        """What it takes at most while it is made, for that many rows where all are kept."""
        height = self.size if self.size is not None else rows or 0
        wide = len(self.parts & {"features", "gradients", "maps"})
        found = 4 * height * self.columns * wide
        if "hadamard" in self.parts and self.size is not None:
            found += 4 * height * self.size * TensorSketch.COPIES
        if self.with_gradients:
            found += 8 * self.paired_rows * self.columns
            found += 8 * self.columns**2 if self.columns <= MOMENT else 0
        return found

    @property
    def with_gradients(self) -> bool:
        return bool(self.parts & {"gradients", "hadamard", "maps"})

    def projection(self) -> Fold | None:
        """What makes its rows narrower; the same for rows of other data."""
        return None if self.fold is None else Fold(self.width, self.fold, self.seed)

    def tensor_sketch(self) -> TensorSketch | None:
        """What makes short rows of f ⊗ g; the same for rows of other data."""
        if self.size is None or "hadamard" not in self.parts:
            return None
        return TensorSketch(self.width, self.size, self.seed)


_SUMMED = 256  # rows that are added up in their own precision


class SiteMaker:
    """Grows one site's sketch; features of a chunk come before its gradients, and chunks in the order of their rows."""

    def __init__(self, form: SiteForm, takes: Takes | None = None) -> None:
        """`takes`: shared by all sites, which saves each of them the draw."""
        self.form = form
        self._parts: dict[str, _Growing] = {}
        self._fold = form.projection()
        self._tensor = form.tensor_sketch()
        self._pairs = Pairing(form.paired_rows, Takes(form.seed) if takes is None else takes)
        self._sums: dict[str, Tensor] = {}
        self._waiting: _Waiting | None = None

    def features(self, rows: Tensor, drawn: Drawn | None) -> Tensor:
        """The rows f of a chunk, whose ‖f‖² come back; `drawn` says where they go, None that all are kept."""
        squares = _squares(rows)
        narrow = rows if self._fold is None else self._fold(rows)
        if "features" in self.form.parts:
            self._grow("features", narrow, squares, drawn)
        if self.form.with_gradients:
            spectra = None if self._tensor is None else self._tensor.features(rows)
            self._waiting = _Waiting(rows, narrow, squares, spectra)
        return squares

    def gradients(self, rows: Tensor, drawn: Drawn | None, start: int) -> Tensor:
        """The rows g of the same chunk, whose first row has the global index `start`; their ‖g‖² come back."""
        assert self._waiting is not None
        f, self._waiting = self._waiting, None
        squares = _squares(rows)
        of_both = f.squares * squares
        self._sum("inner", _inner(f.rows, rows).double().square().sum())
        self._sum("fourth", of_both.square().sum())
        self._sum("trace", of_both.sum())
        narrow = rows if self._fold is None else self._fold(rows)
        if "gradients" in self.form.parts:
            self._grow("gradients", narrow, squares, drawn)
        if "maps" in self.form.parts:
            maps = f.rows * rows
            self._grow("maps", maps if self._fold is None else self._fold(maps), _squares(maps), drawn)
        if self._tensor is not None:
            assert f.spectra is not None
            self._grow("hadamard", self._tensor.product(f.spectra, rows), of_both, drawn)
        if self.form.columns <= MOMENT:
            self._sum("moment", (narrow.T @ f.narrow).double())
        self._pairs.add(f.narrow, narrow, start)
        return squares

    def _sum(self, name: str, found: Tensor) -> None:
        if name in self._sums:
            self._sums[name] += found
        else:
            self._sums[name] = found

    def _grow(self, name: str, rows: Tensor, squares: Tensor, drawn: Drawn | None) -> None:
        if name not in self._parts:
            self._parts[name] = _Growing(self.form.size)
        self._parts[name].add(rows, squares, drawn)

    def finish(self) -> SiteSketch:
        made: dict[str, Part | None] = {
            name: self._parts[name].finish() if name in self._parts else None
            for name in ("features", "gradients", "hadamard", "maps")
        }
        sums = {name: self._sums.get(name) for name in ("inner", "fourth", "moment", "trace")}
        pairs = self._pairs.finish() if self.form.with_gradients else None
        return SiteSketch(self.form.width, **made, **sums, pairs=pairs)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Waiting:
    """What is kept of a chunk's features until its gradients are there."""

    rows: Tensor
    narrow: Tensor
    squares: Tensor
    spectra: Tensor | None


def _squares(rows: Tensor) -> Tensor:
    """(n,) ‖row‖², without a copy of the rows."""
    return torch.linalg.vector_norm(rows, dim=1).double().square()


def _inner(f: Tensor, g: Tensor) -> Tensor:
    """(n,) ⟨f, g⟩ of each row."""
    if not for_numpy(f) or not for_numpy(g) or f.dtype != g.dtype:
        return (f * g).sum(1)
    with np.errstate(all="ignore"):  # what is not finite is noticed elsewhere, and named
        return torch.from_numpy(np.einsum("ij,ij->i", f.numpy(), g.numpy()))


class _Growing:
    """One part so far."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._total: Tensor | None = None
        self._all: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor, squares: Tensor, drawn: Drawn | None) -> None:
        """Rows (n, k), or (2, n, k) in two copies."""
        # Products with ones: summing float32 in float64 would take longer than all the rest. A few rows at a time, or
        # rounding would be taken for variation about the mean.
        total = sum((rows.new_ones(few.shape[-2]) @ few).double() for few in rows.split(_SUMMED, -2))
        assert isinstance(total, Tensor)
        if self._total is None:
            self._total, self._squares = torch.zeros_like(total), torch.zeros_like(squares[0])
            if self.size is not None:
                self._rows = blank(rows, (*rows.shape[:-2], self.size, rows.shape[-1]), zero=True)
                self._diagonal = squares.new_zeros(self.size)
        self._total += total
        self._squares += squares.sum()
        if drawn is None:
            self._all.append((rows.clone(), squares))
            return
        for whole, part in zip(*(t if t.ndim == 3 else t[None] for t in (self._rows, rows)), strict=True):
            drawn.add(whole, part)
        drawn.add(self._diagonal, squares)

    def finish(self) -> Part:
        assert self._total is not None
        if self.size is not None:
            return Part(self._rows, self._total, self._squares, self._diagonal)
        rows, diagonal = torch.cat([r for r, _ in self._all], -2), torch.cat([s for _, s in self._all])
        return Part(rows, self._total, self._squares, diagonal)


def plan_forms(
    widths: Collection[int], size: int | None, parts: frozenset[str], *, seed: int, memory: int, rows: int | None
) -> list[SiteForm]:
    """A form for every site; the widest are projected until all of them fit into the memory."""
    forms = [SiteForm(width, size, parts, seed) for width in widths]
    need = sum(form.bytes(rows) for form in forms)
    if need <= memory:
        return forms
    if size is None:
        raise MemoryError(
            f"keeping every row would take {_size(need)}, over the budget of {_size(memory)}: "
            "give a size, raise memory=, pool with rows='mean', or take fewer sites"
        )
    to = max(widths)
    while to > size:
        to //= 2
        forms = [SiteForm(width, size, parts, seed, to if width > to else None) for width in widths]
        if sum(form.bytes(rows) for form in forms) <= memory:
            return forms
    least = sum(form.bytes(rows) for form in forms)
    projected = f" and {_size(least)} with rows projected to {to} columns," if least < need else ""
    raise MemoryError(
        f"the sketch would take {_size(need)},{projected} over the budget of {_size(memory)}: raise memory=, take a "
        "smaller size, kernels='hadamard' alone, or fewer sites"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count:,} bytes"
