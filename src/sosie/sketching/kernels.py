"""Kernels of features and gradients, from what a sketch keeps of a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from ..linalg import Spectrum, gram_factor, once, self_product, total_squares
from ..stats import Resketch, Scatter, row_hash

# What a sketch keeps of one site: sums over rows, so that parts of the data merge exactly

PARTS = ("features", "gradients", "hadamard", "maps")  # what may be sketched of a site


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

    def merge(self, other: Pairs) -> Pairs:
        index = np.concatenate([self.index, other.index])
        order = smallest(index, self.most, self.seed)
        take = torch.from_numpy(order).to(self.features.device)
        features, gradients = (
            torch.cat([getattr(self, name), getattr(other, name)])[take] for name in ("features", "gradients")
        )
        return replace(self, features=features, gradients=gradients, index=index[order])


def smallest(index: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Where the `most` smallest hashes are, in the order of the index."""
    order = np.argsort(row_hash(index, seed), kind="stable")[:most]
    return order[np.argsort(index[order])]


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

    def merge(self, other: SiteSketch, *, order: Tensor | None) -> SiteSketch:
        merged: dict[str, object] = {"width": self.width}
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name == "width":
                continue
            if mine is None or theirs is None:
                merged[f.name] = None
            elif isinstance(mine, Part):
                merged[f.name] = mine.merge(theirs, order=order)
            elif isinstance(mine, Pairs):
                merged[f.name] = mine.merge(theirs)
            else:
                merged[f.name] = mine + theirs
        return SiteSketch(**merged)  # type: ignore[arg-type]

    def check(self, height: int) -> None:
        """Raise unless all fits together for that many buckets: files come from others."""
        for name in PARTS:
            part = getattr(self, name)
            if part is None:
                continue
            copies, columns = part.rows.shape[:-2], part.rows.shape[-1]
            if part.rows.shape[-2] != height or part.diagonal.shape != (height,) or len(copies) != (name == "hadamard"):
                raise ValueError(f"{name} has shape {tuple(part.rows.shape)}, not {height} rows")
            if part.total.shape != (*copies, columns) or part.squares.ndim or float(part.squares) < 0:
                raise ValueError(f"the sums of {name} do not fit its rows")
            if name != "hadamard" and columns != (self.folded or self.width):
                raise ValueError(f"{name} has {columns} columns, not {self.folded or self.width}")
        for found in (self.inner, self.fourth, self.trace):
            if found is not None and (found.ndim or float(found) < 0):
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


KERNELS = {
    "hadamard": "K_f ∘ K_g, by a TensorSketch of f ⊗ g (exactly where all rows are kept)",
    "features": "K_f: inner products of features",
    "gradients": "K_g: inner products of gradients",
    "sum": "K_f + K_g",
    "maps": "inner products of f ∘ g, neuron by neuron",
    "midpoint": "halfway from K_f to K_g along the geodesic of optimal transport",
    "hadamard_of_sketches": "the product of the sketched K_f and K_g (the paper's algorithm 1)",
}


@dataclass
class Kernel:
    """One site's kernel as a sketch knows it: S K Sᵀ, centred before it was sketched, and as it is."""

    name: str
    n: int  # rows that it stands for
    make: Callable[[bool], Tensor]  # centred? → rows (M, k) whose products are the kernel
    halves: Callable[[], tuple[Tensor, Tensor]] | None = None  # centred rows of two independent sketches of ψ
    trace: Tensor | None = None  # of the centred kernel, exactly
    diagonal: Tensor | None = None  # (M,) the sketched diagonal of the centred kernel
    dtype: torch.dtype = torch.float64  # that the rows were sketched in
    folded: int | None = None  # columns that wider rows were projected to before they were sketched
    columns: tuple[object, ...] = ()  # what the columns of its rows are, if they mean something outside of it

    @property
    def rows(self) -> Tensor:
        """(M, k): centred rows in the coordinates of ψ; wide, so not kept."""
        return self.make(True).double()

    # Wide rows are multiplied on the device they are on; what comes of it is small, and compared on the CPU, so that
    # the two sides may be on different devices.

    @once
    def gram(self) -> Tensor:
        """(M, M): the centred kernel."""
        return self_product(self.rows.T).cpu()

    @once
    def raw_gram(self) -> Tensor:
        """(M, M): the kernel as it is."""
        return self_product(self.make(False).double().T).cpu()

    @once
    def half_grams(self) -> tuple[Tensor, Tensor]:
        """Two independent estimates of the centred kernel, or the kernel twice where it is known."""
        if self.halves is None:
            return self.gram, self.gram
        a, b = (self_product(rows.double().T).cpu() for rows in self.halves())
        return a, b

    @once
    def _narrow(self) -> Tensor | None:
        """The rows, if they are no wider than there are buckets."""
        rows = self.rows
        return rows.cpu() if rows.shape[1] <= len(rows) else None

    @once
    def root(self) -> Tensor:
        """(M, r): rows in no more coordinates than they span, whose products are the centred kernel."""
        if self._narrow is not None:
            return self._narrow
        spectrum = Spectrum.of(self.gram)
        return spectrum.vectors * spectrum.values.sqrt()

    @once
    def factor(self) -> Tensor:
        """The same in other coordinates, in a fraction of the time: for what no rotation changes."""
        return self._narrow if self._narrow is not None else gram_factor(self.gram)

    @once
    def scatter(self) -> Scatter:
        """The covariance in the coordinates of the root."""
        trace = self.gram.trace() if self._narrow is None else total_squares(self._narrow)
        return Scatter(lambda: self_product(self.root) / self.n, self.n, trace / self.n)

    def redrawn(self, draw: Resketch) -> Kernel:
        """The same kernel with its buckets in another order and with other signs."""
        diagonal = None if self.diagonal is None else draw.rows(self.diagonal)
        known = self.halves, self.trace, diagonal, self.dtype, self.folded, self.columns
        return _Redrawn(self.name, self.n, self.make, *known, before=self, draw=draw)


@dataclass
class _Redrawn(Kernel):
    """A kernel whose buckets were drawn anew; what does not depend on them is not made again."""

    before: Kernel = field(kw_only=True, repr=False)
    draw: Resketch = field(kw_only=True, repr=False)

    @property
    def rows(self) -> Tensor:
        return self.draw.rows(self.before.rows)

    @once
    def gram(self) -> Tensor:
        return self.draw.gram(self.before.gram)

    @once
    def raw_gram(self) -> Tensor:
        return self.draw.gram(self.before.raw_gram)

    @once
    def half_grams(self) -> tuple[Tensor, Tensor]:
        a, b = map(self.draw.gram, self.before.half_grams)
        return a, b

    @once
    def root(self) -> Tensor:
        return self.draw.rows(self.before.root)

    @once
    def factor(self) -> Tensor:
        return self.draw.rows(self.before.factor)

    @once
    def scatter(self) -> Scatter:
        return self.before.scatter


@dataclass(frozen=True)
class Rows:
    """What all sites of a sketch share."""

    n: int
    ones: Tensor  # (M,) S 1
    counts: Tensor  # (M,) the same with every sign +1
    exact: bool  # every row has a bucket of its own
    seed: int = 0


def kernel_of(site: SiteSketch, name: str, shared: Rows) -> Kernel:
    """The kernel of that name at one site."""
    if name not in KERNELS:
        raise ValueError(f"no kernel is called {name!r}; there are {', '.join(KERNELS)}")
    if name == "hadamard" and shared.exact:
        name = "hadamard_of_sketches"  # nothing is sketched, so that this is the product itself
    if name in ("hadamard_of_sketches", "midpoint"):
        f, g = _part(site, "features", name), _part(site, "gradients", name)
        make = _product if name == "hadamard_of_sketches" else _midpoint
        found = Kernel(name, shared.n, lambda centred: make(f, g, shared, centred))
    elif name == "sum":
        parts = [_part(site, part, name) for part in ("features", "gradients")]
        found = Kernel(
            name,
            shared.n,
            lambda centred: torch.cat([_rows(part, shared, centred) for part in parts], 1),
            trace=sum((_trace(part, shared, mean_squared(part, shared.n)) for part in parts), torch.zeros(())),
            diagonal=sum((_diagonal(part, shared, mean_squared(part, shared.n)) for part in parts), torch.zeros(())),
        )
    else:
        found = _explicit(
            _part(site, name, name), name, shared, _known_mean(site, shared) if name == "hadamard" else None
        )
    found.dtype = next(part.rows.dtype for kind in PARTS if (part := getattr(site, kind)) is not None)
    found.folded = None if name == "hadamard" else site.folded
    if name == "hadamard":
        found.columns = "f ⊗ g", shared.seed
    elif name != "hadamard_of_sketches":  # whose columns are eigenvectors
        found.columns = ("neurons",) if site.folded is None else (site.folded, shared.seed)
    if shared.exact:
        found.trace, found.diagonal = found.gram.trace(), found.gram.diagonal()
    return found


def _part(site: SiteSketch, part: str, kernel: str) -> Part:
    found: Part | None = getattr(site, part)
    if found is None:
        raise ValueError(
            f"the kernel {kernel!r} needs a sketch of {part}: make it with kernels={kernel!r} among others"
        )
    return found


def _known_mean(site: SiteSketch, shared: Rows) -> Tensor | None:
    """‖ψ̄‖² of f ⊗ g exactly, where Σ g fᵀ was kept: a sketch of a large mean says little about what is left of it."""
    if site.moment is None or len(site.moment) != site.width:
        return None
    return (site.moment / shared.n).square().sum()


def _explicit(part: Part, name: str, shared: Rows, mean: Tensor | None = None) -> Kernel:
    """A kernel whose map was sketched itself; `mean` is ‖ψ̄‖² where that is known better than from the sketch."""
    two = part.rows.ndim == 3
    mean = mean_squared(part, shared.n) if mean is None else mean

    def make(centred: bool) -> Tensor:
        found = _rows(part, shared, centred)
        return torch.cat([*found], 1) / len(found) ** 0.5 if two else found

    def halves() -> tuple[Tensor, Tensor]:
        a, b = _rows(part, shared, True)
        return a, b

    return Kernel(
        name,
        shared.n,
        make,
        halves=halves if two else None,
        trace=_trace(part, shared, mean),
        diagonal=_diagonal(part, shared, mean),
    )


def _rows(part: Part, shared: Rows, centred: bool) -> Tensor:
    """S Ψ, or S (Ψ − 1 ψ̄ᵀ): the mean comes off before the sketch, which centring afterwards would not do."""
    if not centred:
        return part.rows
    mean = part.total / shared.n
    return part.rows.double() - shared.ones.to(mean.device)[:, None] * mean[..., None, :]


def mean_squared(part: Part, n: int) -> Tensor:
    """‖ψ̄‖², averaged over the copies of a sketch of ψ, each of which has it without bias."""
    mean = part.total / n
    return mean.square().sum() / (len(mean) if mean.ndim == 2 else 1)


def _trace(part: Part, shared: Rows, mean_square: Tensor) -> Tensor:
    """Σ ‖ψ − ψ̄‖²."""
    return (part.squares - shared.n * mean_square).cpu()


def _diagonal(part: Part, shared: Rows, mean_square: Tensor) -> Tensor:
    """S (‖ψ₁ − ψ̄‖², …)."""
    mean = part.total / shared.n
    rows, copies = part.rows.double(), len(mean) if mean.ndim == 2 else 1
    with_mean = (rows * mean[..., None, :]).sum(-1).reshape(copies, -1).mean(0)
    return (part.diagonal - 2 * with_mean + mean_square.to(mean.device) * shared.ones.to(mean.device)).cpu()


def _product(f: Part, g: Part, shared: Rows, centred: bool) -> Tensor:
    """Rows whose products are K̃_f ∘ K̃_g."""
    spectrum = Spectrum.of(product_gram(f, g, shared, centred).cpu())
    return spectrum.vectors * spectrum.values.sqrt()


def product_gram(f: Part, g: Part, shared: Rows, centred: bool) -> Tensor:
    """(M, M): K̃_f ∘ K̃_g.

    Signs cancel in the product, so that a bucket stands for the sum of its rows' f ⊗ g, unsigned, and noise; centring
    takes off as many means as the bucket has rows, each of which counts once, however many buckets it is in.
    """
    gram = self_product(f.rows.double().T) * self_product(g.rows.double().T)
    if centred:
        share = (shared.counts / shared.counts.sum()).to(gram.device)  # with a stack, a row is in several buckets
        gram = gram - share[:, None] * gram.sum(0)
        gram = gram - gram.sum(1)[:, None] * share
    return (gram + gram.T) / 2


def _midpoint(f: Part, g: Part, shared: Rows, centred: bool) -> Tensor:
    """(F + G Qᵀ) / 2 with Q = U Vᵀ from Fᵀ G = U Σ Vᵀ: the rotation that brings gradients nearest to features.

    What of the gradients has no counterpart in the features (neurons that are dead, say) goes to columns of its own.
    """
    u, v = _rotation(f.rows.double(), g.rows.double())

    def halfway(of_f: Tensor, of_g: Tensor) -> Tensor:
        turned = of_g @ v
        return torch.cat([of_f + turned @ u.T, of_g - turned @ v.T], -1) / 2

    rows = halfway(f.rows.double(), g.rows.double())
    if not centred:
        return rows
    return rows - shared.ones.to(rows.device)[:, None] * halfway(f.total, g.total) / shared.n


def _rotation(f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """U and V (k, r) with Fᵀ G = U Σ Vᵀ, by way of the smaller of rows and columns."""
    (basis_f, small_f), (basis_g, small_g) = (torch.linalg.qr(side.T) for side in (f, g))
    u, values, vh = torch.linalg.svd(small_f @ small_g.T, full_matrices=False)
    kept = values > f.norm() * g.norm() * torch.finfo(values.dtype).eps * max(f.shape)
    return basis_f @ u[:, kept], basis_g @ vh[kept].T
