"""The sketch of one site: what is kept of it, and how it grows as features come up and gradients come down."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ..linalg import for_numpy
from ..stats import Drawn, RowSampler, row_hash
from ..stats.sample import Fold

PARTS = ("features", "gradients", "hadamard", "maps")  # what may be sketched of a site
MOMENT = 1024  # neurons up to which Σ g fᵀ is kept whole
PAIR_NUMBERS = 2**23  # numbers of each of f and g that are kept for pairs of rows
MOST_PAIRED, FEWEST_PAIRED = 512, 64  # rows that are kept for them
_SUMMED = 256  # rows that are added up in their own precision

# What is kept: sums over rows, so that parts of the data merge exactly


@dataclass(frozen=True)
class Part:
    """S Ψ for one map ψ of the rows, and what it takes to centre it and to know what sketching did to it."""

    rows: Tensor  # (M, k) S Ψ; in two copies (2, M, k) for the sketch of f ⊗ g
    total: Tensor  # (k,) or (2, k): Σ ψ, in float64
    squares: Tensor  # Σ ‖ψ‖², exact even where ψ itself is only sketched
    diagonal: Tensor  # (M,) S (‖ψ₁‖², ‖ψ₂‖², …)

    def merge(self, other: Part, *, order: Tensor | None) -> Part:
        """Sums; rows that were not sketched are put into their order."""
        if order is not None:
            rows = torch.cat([self.rows, other.rows], -2)[..., order, :]
            diagonal = torch.cat([self.diagonal, other.diagonal])[order]
        else:
            rows, diagonal = self.rows + other.rows, self.diagonal + other.diagonal
        return Part(rows, self.total + other.total, self.squares + other.squares, diagonal)


@dataclass(frozen=True)
class Pairs:
    """A few rows as they are, those with the smallest hash: what pairs of rows tell must not come from a sketch."""

    features: Tensor  # (rows, k)
    gradients: Tensor
    index: np.ndarray  # their global indices, ascending
    most: int
    seed: int

    def merge(self, *others: Pairs) -> Pairs:
        """The rows with the smallest hashes of all."""
        index = np.concatenate([lot.index for lot in (self, *others)])
        order = np.argsort(row_hash(index, self.seed), kind="stable")[: self.most]
        order = order[np.argsort(index[order])]
        take = torch.from_numpy(order).to(self.features.device)
        f, g = (torch.cat([getattr(lot, side) for lot in (self, *others)])[take] for side in ("features", "gradients"))
        return replace(self, features=f, gradients=g, index=index[order])


@dataclass(frozen=True)
class SiteSketch:
    """All that is kept of one site."""

    width: int  # columns of its rows, before they were projected
    features: Part | None
    gradients: Part | None
    hadamard: Part | None  # of f ⊗ g, by TensorSketch
    maps: Part | None  # of the products of f and g, neuron by neuron
    inner: Tensor | None  # Σ ⟨f, g⟩²
    fourth: Tensor | None  # Σ (‖f‖² ‖g‖²)²
    moment: Tensor | None  # (k, k) Σ g fᵀ, where that is small
    pairs: Pairs | None
    trace: Tensor | None = None  # Σ ‖f‖² ‖g‖², the trace of K_f ∘ K_g

    @property
    def folded(self) -> int | None:
        """The columns that wider rows were projected to."""
        part = self.features or self.gradients or self.maps
        return None if part is None or part.rows.shape[-1] == self.width else part.rows.shape[-1]

    def part(self, name: str, kernel: str) -> Part:
        """One of the parts, for a kernel."""
        part: Part | None = getattr(self, name)
        if part is None:
            raise ValueError(
                f"the kernel {kernel!r} needs a sketch of {name}: make it with kernels={kernel!r} among others"
            )
        return part

    def merge(self, other: SiteSketch, *, order: Tensor | None) -> SiteSketch:
        merged: dict[str, object] = {}
        for name in [f.name for f in fields(self) if f.name != "width"]:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None:
                merged[name] = None
            elif isinstance(mine, Part):
                merged[name] = mine.merge(theirs, order=order)
            else:
                merged[name] = mine.merge(theirs) if isinstance(mine, Pairs) else mine + theirs
        return replace(self, **merged)  # type: ignore[arg-type]

    def check(self, height: int) -> None:
        """Raise unless all fits together for that many buckets: files come from others."""
        for name in PARTS:
            part = getattr(self, name)
            if part is None:
                continue
            columns = part.rows.shape[-1] if name == "hadamard" else self.folded or self.width
            copies = part.rows.shape[:-2]
            shapes = [tuple(t.shape) for t in (part.rows, part.total, part.squares, part.diagonal)]
            expected = [(*copies, height, columns), (*copies, columns), (), (height,)]
            if shapes != expected or len(copies) != (name == "hadamard") or float(part.squares) < 0:
                raise ValueError(f"{name} has shapes {shapes}, not {expected}")
        for total in (self.inner, self.fourth, self.trace):
            if total is not None and (total.ndim or float(total) < 0):
                raise ValueError("its sums of squared products are no numbers from 0 on")
        if self.moment is not None and (self.moment.ndim != 2 or self.moment.shape[0] != self.moment.shape[1]):
            raise ValueError(f"its moment has shape {tuple(self.moment.shape)}")
        if self.pairs is not None:
            f, g, index = self.pairs.features, self.pairs.gradients, self.pairs.index
            if f.ndim != 2 or f.shape != g.shape or index.shape != (len(f),) or len(f) > self.pairs.most:
                raise ValueError(f"its pairs have shapes {tuple(f.shape)}, {tuple(g.shape)} and {index.shape}")

    def shapes(self) -> tuple[object, ...]:
        """What must agree for two to be merged."""
        kept: Sequence[Part | None] = [getattr(self, name) for name in PARTS]
        return (self.width, *(None if part is None else part.rows.shape[-1] for part in kept))


# How a site is sketched


class TensorSketch:
    """Two independent sketches of f ⊗ g of `to` columns each (Pham and Pagh 2013).

    f and g are folded to `to` columns by hashes and signs of their own, and the two are convolved: entry (i, j) of
    f ⊗ g lands in column h(i) + h′(j) with sign s(i) s′(j). Inner products are ⟨f, f′⟩⟨g, g′⟩ on average; products of
    one sketch with the other are unbiased where those of a sketch with itself are too large.
    """

    COPIES = 2

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        self.to = to
        self._of_f = [Fold(width, to, seed * 4 + 1_000_000 + copy) for copy in range(self.COPIES)]
        self._of_g = [Fold(width, to, seed * 4 + 1_000_002 + copy) for copy in range(self.COPIES)]

    def features(self, rows: Tensor) -> Tensor:
        """(copies, n, to // 2 + 1): what is kept of f until g is there."""
        return torch.fft.rfft(torch.stack([fold(rows) for fold in self._of_f]))

    def product(self, features: Tensor, rows: Tensor) -> Tensor:
        """(copies, n, to): the sketch of f ⊗ g, from what was kept of f and the rows g."""
        of_g = torch.fft.rfft(torch.stack([fold(rows) for fold in self._of_g]))
        return torch.fft.irfft(features * of_g, n=self.to)


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

    @property
    def with_gradients(self) -> bool:
        return bool(self.parts & {"gradients", "hadamard", "maps"})

    def bytes(self, rows: int | None) -> int:
        """What it takes at most while it is made, for that many rows where all are kept."""
        height = self.size if self.size is not None else rows or 0
        total = 4 * height * self.columns * len(self.parts & {"features", "gradients", "maps"})
        if "hadamard" in self.parts and self.size is not None:
            total += 4 * height * self.size * TensorSketch.COPIES
        if self.with_gradients:
            total += 8 * self.paired_rows * self.columns
            total += 8 * self.columns**2 if self.columns <= MOMENT else 0
        return total

    def project(self) -> Callable[[Tensor], Tensor]:
        """What makes its rows narrower, if they are too wide; the same for rows of other data."""
        return (lambda rows: rows) if self.fold is None else Fold(self.width, self.fold, self.seed)

    def tensor_sketch(self) -> TensorSketch | None:
        """What makes short rows of f ⊗ g; the same for rows of other data."""
        if self.size is None or "hadamard" not in self.parts:
            return None
        return TensorSketch(self.width, self.size, self.seed)


def plan_forms(
    widths: Collection[int], size: int | None, parts: frozenset[str], *, seed: int, memory: int, rows: int | None
) -> list[SiteForm]:
    """A form for every site; the widest are projected until all of them fit into the memory."""
    forms = [SiteForm(width, size, parts, seed) for width in widths]
    need = least = sum(form.bytes(rows) for form in forms)
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
        least = sum(form.bytes(rows) for form in forms)
        if least <= memory:
            return forms
    projected = f" and {_size(least)} with rows projected to {to} columns," if least < need else ""
    raise MemoryError(
        f"the sketch would take {_size(need)},{projected} over the budget of {_size(memory)}: raise memory=, take a "
        "smaller size, kernels='hadamard' alone, or fewer sites"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count:,} bytes"


# How it grows


class SiteMaker:
    """Grows one site's sketch; features of a chunk come before its gradients, and chunks in the order of their rows."""

    def __init__(self, form: SiteForm, samplers: dict[int, RowSampler]) -> None:
        """`samplers`: by the number of rows they keep, shared by all sites, which saves each of them the draw."""
        self.form = form
        self._sampler = samplers.setdefault(form.paired_rows, RowSampler(form.paired_rows, form.seed))
        self._project, self._tensor = form.project(), form.tensor_sketch()
        self._parts: dict[str, Part] = {}
        self._all: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in PARTS}  # where every row is kept
        self._pairs: list[Pairs] = []
        self._sums: dict[str, Tensor] = {}
        self._waiting: tuple[Tensor, Tensor, Tensor, Tensor | None]  # a chunk's features, until its gradients come

    def features(self, rows: Tensor, drawn: Drawn | None) -> Tensor:
        """The rows f of a chunk, whose ‖f‖² come back; `drawn` says where they go, None that all are kept."""
        squares, narrow = _squares(rows), self._project(rows)
        if "features" in self.form.parts:
            self._grow("features", narrow, squares, drawn)
        if self.form.with_gradients:
            self._waiting = rows, narrow, squares, None if self._tensor is None else self._tensor.features(rows)
        return squares

    def gradients(self, rows: Tensor, drawn: Drawn | None, start: int) -> Tensor:
        """The rows g of the same chunk, whose first row has the global index `start`; their ‖g‖² come back."""
        f, narrow_f, squares_f, spectra = self._waiting
        del self._waiting
        squares, narrow = _squares(rows), self._project(rows)
        of_both = squares_f * squares
        self._sum("inner", _inner(f, rows).double().square().sum())
        self._sum("fourth", of_both.square().sum())
        self._sum("trace", of_both.sum())
        if "gradients" in self.form.parts:
            self._grow("gradients", narrow, squares, drawn)
        if "maps" in self.form.parts:
            maps = f * rows
            self._grow("maps", self._project(maps), _squares(maps), drawn)
        if self._tensor is not None:
            assert spectra is not None
            self._grow("hadamard", self._tensor.product(spectra, rows), of_both, drawn)
        if self.form.columns <= MOMENT:
            self._sum("moment", (narrow.T @ narrow_f).double())
        most = self.form.paired_rows
        index = self._sampler.draw(start, len(rows))
        if len(index):
            take = torch.from_numpy(index - start).to(rows.device, non_blocking=True)
            kept_f, kept_g = narrow_f[take], narrow[take]
            self._pairs.append(Pairs(kept_f, kept_g, index, most, self.form.seed))
        if sum(len(lot.index) for lot in self._pairs) > 2 * most:
            self._pairs = [self._pairs[0].merge(*self._pairs[1:])]
        return squares

    def _sum(self, name: str, number: Tensor) -> None:
        if name in self._sums:
            self._sums[name] += number
        else:
            self._sums[name] = number

    def _grow(self, name: str, rows: Tensor, squares: Tensor, drawn: Drawn | None) -> None:
        """Add rows (n, k), or (2, n, k) in two copies, to a part."""
        # Products with ones: summing float32 in float64 would take longer than all the rest. A few rows at a time, or
        # rounding would be taken for variation about the mean.
        total = torch.stack([(rows.new_ones(few.shape[-2]) @ few).double() for few in rows.split(_SUMMED, -2)]).sum(0)
        if name not in self._parts:
            shape = (*rows.shape[:-2], self.form.size or 0, rows.shape[-1])
            diagonal = squares.new_zeros(self.form.size or 0)
            zero = torch.zeros_like(squares[0])
            self._parts[name] = Part(rows.new_zeros(shape), torch.zeros_like(total), zero, diagonal)
        part = self._parts[name]
        part.total.add_(total)
        part.squares.add_(squares.sum())
        if drawn is None:
            self._all[name].append((rows.clone(), squares))
            return
        for whole, copy in zip(*(t if t.ndim == 3 else t[None] for t in (part.rows, rows)), strict=True):
            drawn.add(whole, copy)
        drawn.add(part.diagonal, squares)

    def finish(self) -> SiteSketch:
        parts: dict[str, Part | None] = {name: self._parts.get(name) for name in PARTS}
        for name, part in self._parts.items():
            if self.form.size is None:
                rows, diagonal = zip(*self._all[name], strict=True)
                parts[name] = replace(part, rows=torch.cat(rows, -2), diagonal=torch.cat(diagonal))
        sums = {name: self._sums.get(name) for name in ("inner", "fourth", "moment", "trace")}
        pairs = self._pairs[0].merge(*self._pairs[1:]) if self.form.with_gradients else None
        return SiteSketch(self.form.width, **parts, **sums, pairs=pairs)  # type: ignore[arg-type]


def _squares(rows: Tensor) -> Tensor:
    """(n,) ‖row‖², without a copy of the rows."""
    return torch.linalg.vector_norm(rows, dim=1).double().square()


def _inner(f: Tensor, g: Tensor) -> Tensor:
    """(n,) ⟨f, g⟩ of each row."""
    if not for_numpy(f) or not for_numpy(g) or f.dtype != g.dtype:
        return (f * g).sum(1)
    with np.errstate(all="ignore"):  # what is not finite is noticed elsewhere, and named
        return torch.from_numpy(np.einsum("ij,ij->i", f.numpy(), g.numpy()))
