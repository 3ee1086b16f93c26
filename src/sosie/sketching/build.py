"""Making the sketch of one site as its rows appear: features on the way up, gradients on the way down."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..linalg import for_numpy
from ..stats import Drawn, RowSampler
from ..stats.sample import Fold
from .kernels import Pairs, Part, SiteSketch, smallest

# The rows of a site that are kept as they are, for pairs of rows, as they appear


class SampledRows:
    """Which rows of a chunk are kept: sites that keep as many share the draw, and its copy on a device."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lotteries: dict[int, RowSampler] = {}
        self._places: dict[tuple[int, torch.device], tuple[np.ndarray, Tensor]] = {}

    def draw(self, most: int, start: int, rows: Tensor) -> tuple[np.ndarray, Tensor | None]:
        """Global indices kept of rows whose first has the index `start`, and where they are; None: all are kept."""
        if most not in self._lotteries:
            self._lotteries[most] = RowSampler(most, self.seed)
        index = self._lotteries[most].draw(start, len(rows))
        if len(index) == len(rows):
            return index, None
        key = most, rows.device
        if key not in self._places or self._places[key][0] is not index:  # the same array for the same chunk
            self._places[key] = index, _on(rows.device, index - start)
        return self._places[key]


class Pairing:
    """The rows of features and gradients with the smallest hashes so far; chunks come in the order of their rows."""

    def __init__(self, most: int, takes: SampledRows) -> None:
        self.most, self._takes = most, takes
        self._lots: list[tuple[np.ndarray, Tensor, Tensor]] = []

    def add(self, f: Tensor, g: Tensor, start: int) -> None:
        index, take = self._takes.draw(self.most, start, f)
        if len(index):
            self._lots.append((index, _taken([f], [take], len(index)), _taken([g], [take], len(index))))
        if sum(len(index) for index, *_ in self._lots) > 2 * self.most:
            self._lots = [self._smallest()]

    def finish(self) -> Pairs:
        index, f, g = self._smallest()
        return Pairs(f, g, index, self.most, self._takes.seed)

    def _smallest(self) -> tuple[np.ndarray, Tensor, Tensor]:
        """Those that stay, each copied once at most."""
        indices, fs, gs = zip(*self._lots, strict=True)
        index = np.concatenate(indices)
        order = smallest(index, self.most, self._takes.seed)
        if len(self._lots) == 1 and len(order) == len(index):
            return self._lots[0]
        takes: list[Tensor | None] = []
        first = 0
        for lot in indices:
            chosen = order[(order >= first) & (order < first + len(lot))] - first
            takes.append(None if len(chosen) == len(lot) else _on(fs[0].device, chosen))
            first += len(lot)
        return index[order], _taken(fs, takes, len(order)), _taken(gs, takes, len(order))


def _taken(lots: list[Tensor] | tuple[Tensor, ...], takes: list[Tensor | None], count: int) -> Tensor:
    """(count, k): what is taken of each lot, one after the other; None takes all of it."""
    found = blank(lots[0], (count, lots[0].shape[1]))
    first = 0
    for rows, take in zip(lots, takes, strict=True):
        place = found[first : first + (len(rows) if take is None else len(take))]
        if take is None:
            place.copy_(rows)
        elif for_numpy(rows):
            np.take(rows.numpy(), take.numpy(), axis=0, out=place.numpy(), mode="clip")  # others copy twice
        else:
            torch.index_select(rows, 0, take, out=place)
        first += len(place)
    return found


def blank(like: Tensor, shape: tuple[int, ...], *, zero: bool = False) -> Tensor:
    """Room for numbers of a tensor's kind, where it is.

    On a CPU from NumPy, which asks for large pages: with small ones, the first touch of each takes longer than the
    sums.
    """
    if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
        return like.new_zeros(shape) if zero else like.new_empty(shape)
    kind = np.float32 if like.dtype == torch.float32 else np.float64
    return torch.from_numpy(np.zeros(shape, kind) if zero else np.empty(shape, kind))


def _on(device: torch.device, numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(numbers).to(device, non_blocking=True)


# TensorSketch: a short vector for f ⊗ g, whose inner products are ⟨f, f′⟩⟨g, g′⟩ on average


class TensorSketch:
    """Two independent sketches of f ⊗ g of `to` columns each (Pham and Pagh 2013).

    f and g are folded to `to` columns by hashes and signs of their own, and the two are convolved: entry (i, j) of
    f ⊗ g lands in column h(i) + h′(j) with sign s(i) s′(j). Products of one sketch with the other are unbiased where
    those of a sketch with itself are too large.
    """

    COPIES = 2

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        self.to = to
        self._of_f = [Fold(width, to, seed * 4 + 1_000_000 + copy) for copy in range(self.COPIES)]
        self._of_g = [Fold(width, to, seed * 4 + 1_000_002 + copy) for copy in range(self.COPIES)]

    def features(self, rows: Tensor) -> Tensor:
        """(copies, n, to // 2 + 1): what is kept of f until g is there."""
        return _spectra(self._of_f, rows)

    def product(self, features: Tensor, rows: Tensor) -> Tensor:
        """(copies, n, to): the sketch of f ⊗ g, from what was kept of f and the rows g."""
        return torch.fft.irfft(features * _spectra(self._of_g, rows), n=self.to)


def _spectra(folds: list[Fold], rows: Tensor) -> Tensor:
    return torch.fft.rfft(torch.stack([fold(rows) for fold in folds]))


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

    def __init__(self, form: SiteForm, takes: SampledRows | None = None) -> None:
        """`takes`: shared by all sites, which saves each of them the draw."""
        self.form = form
        self._parts: dict[str, _Growing] = {}
        self._fold = form.projection()
        self._tensor = form.tensor_sketch()
        self._pairs = Pairing(form.paired_rows, SampledRows(form.seed) if takes is None else takes)
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
