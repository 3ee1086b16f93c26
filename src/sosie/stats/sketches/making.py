"""Making the sketch of one site as its rows appear: features on the way up, gradients on the way down."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..lottery import Fold, Lottery
from .hashes import Drawn
from .site import Pairs, Part, SiteSketch, smallest
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
        height = 2 * self.size if self.size is not None else rows or 0  # rows to add and rows to take off, apart
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
    """Grows one site's sketch; features of a chunk come before its gradients."""

    def __init__(self, form: SiteForm) -> None:
        self.form = form
        self._parts: dict[str, _Growing] = {}
        self._fold = form.projection()
        self._tensor = form.tensor_sketch()
        self._pairs = _Pairing(form.paired_rows, form.seed)
        self._inner: Tensor | None = None
        self._fourth: Tensor | None = None
        self._trace: Tensor | None = None
        self._moment: Tensor | None = None
        self._waiting: tuple[Tensor, Tensor, Tensor | None] | None = None

    def features(self, rows: Tensor, drawn: Drawn | None) -> Tensor:
        """The rows f of a chunk, whose ‖f‖² come back; `drawn` says where they go, None that all are kept."""
        squares = _squares(rows)
        narrow = rows if self._fold is None else self._fold(rows)
        if "features" in self.form.parts:
            self._grow("features", narrow, squares, drawn)
        if self.form.with_gradients:
            self._waiting = rows, squares, None if self._tensor is None else self._tensor.features(rows)
        return squares

    def gradients(self, rows: Tensor, drawn: Drawn | None, start: int) -> Tensor:
        """The rows g of the same chunk, whose first row has the global index `start`; their ‖g‖² come back."""
        assert self._waiting is not None
        (features, of_f, spectra), self._waiting = self._waiting, None
        of_g = _squares(rows)
        inner = torch.einsum("nk,nk->n", features, rows).double().square().sum()
        of_both = of_f * of_g
        fourth, trace = of_both.square().sum(), of_both.sum()
        self._inner = inner if self._inner is None else self._inner + inner
        self._fourth = fourth if self._fourth is None else self._fourth + fourth
        self._trace = trace if self._trace is None else self._trace + trace
        f, g = (features, rows) if self._fold is None else (self._fold(features), self._fold(rows))
        if "gradients" in self.form.parts:
            self._grow("gradients", g, of_g, drawn)
        if "maps" in self.form.parts:
            maps = features * rows
            self._grow("maps", maps if self._fold is None else self._fold(maps), _squares(maps), drawn)
        if self._tensor is not None:
            assert spectra is not None
            self._grow("hadamard", self._tensor.product(spectra, rows), of_both, drawn)
        if self.form.columns <= MOMENT:
            moment = (g.T @ f).double()
            self._moment = moment if self._moment is None else self._moment + moment
        self._pairs.add(f, g, start)
        return of_g

    def _grow(self, name: str, rows: Tensor, squares: Tensor, drawn: Drawn | None) -> None:
        if name not in self._parts:
            self._parts[name] = _Growing(self.form.size)
        self._parts[name].add(rows, squares, drawn)

    def finish(self) -> SiteSketch:
        made: dict[str, Part | None] = {
            name: self._parts[name].finish() if name in self._parts else None
            for name in ("features", "gradients", "hadamard", "maps")
        }
        return SiteSketch(
            self.form.width,
            **made,
            inner=self._inner,
            fourth=self._fourth,
            moment=self._moment,
            pairs=self._pairs.finish() if self.form.with_gradients else None,
            trace=self._trace,
        )


def _squares(rows: Tensor) -> Tensor:
    """(n,) ‖row‖², without a copy of the rows."""
    return torch.linalg.vector_norm(rows, dim=1).double().square()


class _Growing:
    """One part so far."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._rows: Tensor | None = None
        self._all: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor, squares: Tensor, drawn: Drawn | None) -> None:
        """Rows (n, k), or (2, n, k) in two copies."""
        # Products with ones: summing float32 in float64 would take longer than all the rest. A few rows at a time, or
        # rounding would be taken for variation about the mean.
        total = sum((rows.new_ones(lot.shape[-2]) @ lot).double() for lot in rows.split(_SUMMED, -2))
        assert isinstance(total, Tensor)
        if self._rows is None:
            self._total, self._squares = torch.zeros_like(total), torch.zeros_like(squares[0])
            self._rows = rows.new_zeros(*rows.shape[:-2], 2 * (self.size or 0), rows.shape[-1])
            self._diagonal = squares.new_zeros(self.size or 0)
        self._total += total
        self._squares += squares.sum()
        if drawn is None:
            self._all.append((rows.clone(), squares))
            return
        for whole, part in zip(*(t if t.ndim == 3 else t[None] for t in (self._rows, rows)), strict=True):
            drawn.add_apart(whole, part)
        drawn.add(self._diagonal, squares)
        self._drawn = drawn

    def finish(self) -> Part:
        assert self._rows is not None
        if self.size is None:
            rows, diagonal = torch.cat([r for r, _ in self._all], -2), torch.cat([s for _, s in self._all])
        else:
            whole, diagonal = self._rows, self._diagonal
            together = self._drawn.together
            rows = together(whole) if whole.ndim == 2 else torch.stack([together(copy) for copy in whole])
        return Part(rows, self._total, self._squares, diagonal)


class _Pairing:
    """The rows with the smallest hashes so far."""

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.seed = most, seed
        self._lottery = Lottery(most, seed)
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._index: list[np.ndarray] = []

    def add(self, f: Tensor, g: Tensor, start: int) -> None:
        index = self._lottery.draw(start, len(f))
        take = torch.from_numpy(index - start).to(f.device)
        self._kept.append((f[take], g[take]))
        self._index.append(index)
        if sum(map(len, self._index)) > 2 * self.most:
            found = self.finish()
            self._kept, self._index = [(found.features, found.gradients)], [found.index]

    def finish(self) -> Pairs:
        index = np.concatenate(self._index)
        order = smallest(index, self.most, self.seed)
        take = torch.from_numpy(order).to(self._kept[0][0].device)
        f, g = (torch.cat(lots)[take] for lots in zip(*self._kept, strict=True))
        return Pairs(f, g, index[order], self.most, self.seed)


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
