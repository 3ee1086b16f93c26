"""Kernels of features and gradients from the sketches of sites, and the views of two of them that measures read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..checks import one_of
from ..linalg.products import gram_factor, once, product, self_product, threads_for, total_squares
from ..linalg.spectra import ENOUGH_DIGITS, ENOUGH_DIGITS_FLOAT32, Spectrum, nuclear_norm
from ..stats.sampling import Resketch
from ..stats.views import Alignment, Covariances, DebiasedAlignment, PairedRows, Scatter, SiteRows, UncentredAlignment

if TYPE_CHECKING:
    from .sketches import Part, SiteSketch, Sketch

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
    """The sketched kernel S K Sᵀ of one site, both centred (before sketching) and uncentred."""

    name: str
    n: int  # number of rows that were sketched
    make: Callable[[bool], Tensor]  # centred? → rows (M, k) whose products are the kernel
    halves: Callable[[], tuple[Tensor, Tensor]] | None = None  # centred rows of two independent sketches of ψ
    trace: Tensor | None = None  # of the centred kernel, exact
    diagonal: Tensor | None = None  # (M,) the sketched diagonal of the centred kernel
    dtype: torch.dtype = torch.float64  # in which rows were sketched
    folded: int | None = None  # columns that rows were projected to before they were sketched
    columns: tuple[object, ...] = ()  # identifies the columns, where those of two kernels may correspond

    @property
    def rows(self) -> Tensor:
        """(M, k): centred rows in the coordinates of ψ; they are wide, so they are not kept."""
        return self.make(True).double()

    # Wide rows are multiplied on their device; the products are small, and compared on the CPU, so that the sides may
    # be on different devices.

    @once
    def gram(self) -> Tensor:
        """(M, M): the centred kernel."""
        return self_product(self.rows.T).cpu()

    @once
    def raw_gram(self) -> Tensor:
        """(M, M): the uncentred kernel."""
        return self_product(self.make(False).double().T).cpu()

    @once
    def half_grams(self) -> tuple[Tensor, Tensor]:
        """Two independent estimates of the centred kernel, or the kernel twice where it is known exactly."""
        if self.halves is None:
            return self.gram, self.gram
        a, b = (self_product(rows.double().T).cpu() for rows in self.halves())
        return a, b

    @once
    def _narrow(self) -> Tensor | None:
        """The rows, if they have no more columns than there are buckets."""
        rows = self.rows
        return rows.cpu() if rows.shape[1] <= len(rows) else None

    @once
    def root(self) -> Tensor:
        """(M, r): rows in as few coordinates as they span, whose products are the centred kernel."""
        return _root(self.gram) if self._narrow is None else self._narrow

    @once
    def factor(self) -> Tensor:
        """(M, r): the root up to a rotation, in a fraction of the time."""
        return gram_factor(self.gram) if self._narrow is None else self._narrow

    @once
    def scatter(self) -> Scatter:
        """The covariance in the coordinates of the root."""
        trace = self.gram.trace() if self._narrow is None else total_squares(self._narrow)
        return Scatter(lambda: self_product(self.root) / self.n, self.n, trace / self.n)

    @property
    def unbiased(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Two independent estimates of the kernel, its trace and its diagonal, which correct the bias of a sketch."""
        if self.trace is None or self.diagonal is None:
            raise ValueError(
                f"the kernel {self.name!r} has no debiased value, since it is not known how much sketching adds to it: "
                "take linear_cka, or a sketch of every row (size=None)"
            )
        return *self.half_grams, self.trace.double(), self.diagonal.double()

    def redrawn(self, draw: Resketch) -> Kernel:
        """This kernel with other buckets and signs, as if no row were shared."""
        diagonal = None if self.diagonal is None else draw.rows(self.diagonal)
        known = self.halves, self.trace, diagonal, self.dtype, self.folded, self.columns
        return _RedrawnKernel(self.name, self.n, self.make, *known, before=self, draw=draw)


@dataclass
class _RedrawnKernel(Kernel):
    """A kernel with other buckets and signs, made from the original without sketching again."""

    before: Kernel = field(kw_only=True, repr=False)
    draw: Resketch = field(kw_only=True, repr=False)

    rows = property(lambda self: self.draw.rows(self.before.rows))
    gram = once(lambda self: self.draw.gram(self.before.gram))
    raw_gram = once(lambda self: self.draw.gram(self.before.raw_gram))
    half_grams = once(lambda self: tuple(map(self.draw.gram, self.before.half_grams)))
    root = once(lambda self: self.draw.rows(self.before.root))
    factor = once(lambda self: self.draw.rows(self.before.factor))
    scatter = once(lambda self: self.before.scatter)


def kernel_of(site: SiteSketch, name: str, sketch: Sketch) -> Kernel:
    """The kernel of that name at one site of a sketch."""
    if one_of(name, "kernel", KERNELS) == "hadamard" and sketch.exact:
        name = "hadamard_of_sketches"  # rows are not sketched, so this is the product itself
    n = sketch.n
    if name in ("hadamard_of_sketches", "midpoint"):
        f, g = site.part("features", name), site.part("gradients", name)
        if name == "midpoint":
            kernel = Kernel(name, n, lambda centred: _midpoint(f, g, sketch, centred))
        else:
            kernel = Kernel(name, n, lambda centred: _root(product_gram(f, g, sketch, centred).cpu()))
    else:
        parts = [site.part(part, name) for part in (("features", "gradients") if name == "sum" else (name,))]
        two = name == "hadamard"  # copies
        means = [mean_squared(part, n) for part in parts]
        if two and site.moment is not None and len(site.moment) == site.width:
            # ‖ψ̄‖² of f ⊗ g, exactly: the error of a large sketched mean would outweigh the centred kernel.
            means = [(site.moment / n).square().sum()]

        def make(centred: bool) -> Tensor:
            rows = [_rows(part, sketch, centred) for part in parts]
            return side_by_side(rows[0]) if two else torch.cat(rows, 1) if len(rows) > 1 else rows[0]

        kernel = Kernel(
            name,
            n,
            make,
            halves=(lambda: tuple(_rows(parts[0], sketch, True))) if two else None,
            trace=torch.stack([(part.squares - n * mean).cpu() for part, mean in zip(parts, means, strict=True)]).sum(),
            diagonal=torch.stack([_diagonal(p, sketch, mean) for p, mean in zip(parts, means, strict=True)]).sum(0),
        )
    kernel.dtype = site.dtype
    kernel.folded = None if name == "hadamard" else site.folded
    if name == "hadamard":
        kernel.columns = "f ⊗ g", sketch.seed
    elif name != "hadamard_of_sketches":  # there, columns are eigenvectors
        kernel.columns = ("neurons",) if site.folded is None else (site.folded, sketch.seed)
    if sketch.exact:
        kernel.trace, kernel.diagonal = kernel.gram.trace(), kernel.gram.diagonal()
    return kernel


def side_by_side(copies: Tensor) -> Tensor:
    """(n, 2k) from the two copies (2, n, k) of a TensorSketch; inner products are the mean over the copies."""
    return torch.cat([*copies], 1) / len(copies) ** 0.5


def mean_squared(part: Part, n: int) -> Tensor:
    """‖ψ̄‖², averaged over the copies of a sketch of ψ, which are unbiased."""
    mean = part.total / n
    return mean.square().sum() / (len(mean) if mean.ndim == 2 else 1)


def _rows(part: Part, sketch: Sketch, centred: bool) -> Tensor:
    """S Ψ, or S (Ψ − 1 ψ̄ᵀ): centred before sketching, which differs from centring afterwards."""
    if not centred:
        return part.rows
    mean = part.total / sketch.n
    return part.rows.double() - sketch.ones.to(mean.device)[:, None] * mean[..., None, :]


def _diagonal(part: Part, sketch: Sketch, mean_square: Tensor) -> Tensor:
    """S (‖ψ₁ − ψ̄‖², …)."""
    mean = part.total / sketch.n
    rows, copies = part.rows.double(), len(mean) if mean.ndim == 2 else 1
    with_mean = (rows * mean[..., None, :]).sum(-1).reshape(copies, -1).mean(0)
    return (part.diagonal - 2 * with_mean + mean_square.to(mean.device) * sketch.ones.to(mean.device)).cpu()


def _root(gram: Tensor) -> Tensor:
    """Rows whose products are the Gram matrix."""
    spectrum = Spectrum.of(gram)
    return spectrum.vectors * spectrum.values.sqrt()


def product_gram(f: Part, g: Part, sketch: Sketch, centred: bool) -> Tensor:
    """(M, M): K̃_f ∘ K̃_g.

    Signs cancel in the product, so a bucket holds the unsigned sum of f ⊗ g over its rows, and noise. Centring
    subtracts the mean once for each row of the bucket; a row counts once, however many buckets it is in.
    """
    gram = self_product(f.rows.double().T) * self_product(g.rows.double().T)
    if centred:
        share = (sketch.counts / sketch.counts.sum()).to(gram.device)  # a stack puts a row into several buckets
        gram = gram - share[:, None] * gram.sum(0)
        gram = gram - gram.sum(1)[:, None] * share
    return (gram + gram.T) / 2


def _midpoint(f: Part, g: Part, sketch: Sketch, centred: bool) -> Tensor:
    """(F + G Qᵀ) / 2 with Q = U Vᵀ from Fᵀ G = U Σ Vᵀ: the rotation that brings gradients nearest to features.

    Directions of the gradients without a counterpart in the features (dead neurons, say) get their own columns.
    """
    rows_f, rows_g = f.rows.double(), g.rows.double()
    # U and V (k, r) by way of the smaller of rows and columns.
    (basis_f, small_f), (basis_g, small_g) = (torch.linalg.qr(side.T) for side in (rows_f, rows_g))
    u, values, vh = torch.linalg.svd(small_f @ small_g.T, full_matrices=False)
    kept = values > rows_f.norm() * rows_g.norm() * torch.finfo(values.dtype).eps * max(rows_f.shape)
    u, v = basis_f @ u[:, kept], basis_g @ vh[kept].T

    def halfway(of_f: Tensor, of_g: Tensor) -> Tensor:
        turned = of_g @ v
        return torch.cat([of_f + turned @ u.T, of_g - turned @ v.T], -1) / 2

    rows = halfway(rows_f, rows_g)
    if not centred:
        return rows
    return rows - sketch.ones.to(rows.device)[:, None] * halfway(f.total, g.total) / sketch.n


@dataclass
class SketchPair:
    """The kernels of every site of two sketches of one size."""

    a: Sequence[Kernel]
    b: Sequence[Kernel]
    size: int  # buckets
    exact: bool
    stack: int = 1  # buckets that each row is in

    supplies: ClassVar = frozenset({Alignment, DebiasedAlignment, UncentredAlignment, Covariances})

    @property
    def n(self) -> int:
        return min(kernel.n for kernel in (*self.a, *self.b))

    @property
    def signed(self) -> bool:
        """Whether kernels have signs: they cancel in a product of sketches, and rows that are kept have none."""
        return self.a[0].name != "hadamard_of_sketches" and not self.exact

    def redrawn(self, seed: int, number: int) -> SketchPair:
        """This pair with other buckets and signs for B, as if the two sketches shared no rows."""
        draw = Resketch.draw(self.size, seed, number, signed=self.signed)
        return replace(self, b=[kernel.redrawn(draw) for kernel in self.b])

    def alignment(self, kind: type[Alignment]) -> Alignment:
        """Inner products of the kernels of every pair of sites: xx (A, 1), yy (1, B), xy (A, B)."""
        return self._aligned(kind, lambda rows, diagonal: rows.sum(0))

    def left_out(self, kind: type[Alignment]) -> Alignment:
        """xx (M, A, 1), yy (M, 1, B), xy (M, A, B): with each bucket left out, scaled to the full number of buckets.

        Buckets are nearly independent, so their spread gives the error of the whole. The means, subtracted before
        sketching, stay.
        """
        return self._aligned(kind, _without_each)

    def _aligned(self, kind: type[Alignment], total: Callable[[Tensor, Tensor], Tensor]) -> Alignment:
        """The alignment; `total` sums over pairs of buckets, given the sums over the second (M, …), and the diagonal.

        The debiased alignment estimates that of U-centred Gram matrices of all rows, without the bias of sketching:
        E⟨S K Sᵀ, S L Sᵀ⟩ = ⟨K, L⟩ (1 + 1/M) + (tr K tr L − 2 Σ Kᵢᵢ Lᵢᵢ) / M.
        """
        if kind is not DebiasedAlignment:
            k, l = self._grams(kind)
            xx, yy = (total(*_products(side, side)) for side in (k, l))
            return kind(xx[..., :, None], yy[..., None, :], total(*_all_products(k, l)))
        if self.n < 4:
            raise ValueError(f"the debiased alignment needs at least 4 rows, got {self.n}")
        # Of each side: two independent estimates of every kernel, the traces (A,) and the diagonals (M, A).
        parts = [list(zip(*(kernel.unbiased for kernel in side), strict=True)) for side in (self.a, self.b)]
        (first_a, second_a, *_), (first_b, second_b, *_) = parts
        xx, yy = total(*_products(first_a, second_a)), total(*_products(first_b, second_b))
        xy = (total(*_all_products(first_a, second_b)) + total(*_all_products(second_a, first_b))) / 2
        (traces_a, a), (traces_b, b) = ((torch.stack(traces), torch.stack(d, 1)) for *_, traces, d in parts)

        def unbiased(products: Tensor, traces: Tensor, diagonals: Tensor) -> Tensor:
            n, m, diagonals = self.n, self.size, total(diagonals, diagonals)
            if not self.exact:
                products = (m * products - traces + 2 * diagonals) / (m + 1)
            return products - n / (n - 2) * diagonals + traces / ((n - 1) * (n - 2))

        return DebiasedAlignment(
            unbiased(xx, traces_a**2, a**2)[..., :, None],
            unbiased(yy, traces_b**2, b**2)[..., None, :],
            unbiased(xy, traces_a[:, None] * traces_b, a[:, :, None] * b[:, None, :]),
        )

    def redrawn_moments(self, kind: type[Alignment]) -> tuple[Tensor, Tensor | None]:
        """(A, B) each: mean and variance of xy over all draws of other buckets and signs.

        Signs make entries off the diagonal 0 on average; without signs there is no simple variance.
        """
        m = self.size
        (x, x_spread, x_beside, x_squares), (y, y_spread, y_beside, y_squares) = map(_entries, self._grams(kind))
        mean = x[:, None] * y / m
        if not self.signed:
            return mean + x_beside[:, None] * y_beside / (m * (m - 1)), None
        variance = x_spread[:, None] * y_spread / (m - 1)
        return mean, variance + 2 * x_squares[:, None] * y_squares / (m * (m - 1))

    def _grams(self, kind: type[Alignment]) -> tuple[list[Tensor], list[Tensor]]:
        """The Gram matrices of both sides, centred or not."""
        name = "raw_gram" if kind is UncentredAlignment else "gram"
        a, b = ([getattr(kernel, name) for kernel in side] for side in (self.a, self.b))
        return a, b

    def covariances(self, i: int, j: int) -> Covariances:
        """The covariances of site i of A and site j of B, in as few coordinates as the buckets span."""
        x, y = self.a[i], self.b[j]
        return _KernelCovariances(
            x.scatter, y.scatter, lambda: product(x.root.T, y.root) / (x.n * y.n) ** 0.5, kernels=(x, y)
        )

    def paired(self, i: int, j: int) -> PairedRows:
        """Buckets as rows, scaled to have the covariance of the rows; for measures that need no pairing."""
        a, b = self.a[i], self.b[j]
        if not a.columns or not b.columns:
            raise ValueError(
                "a product of Gram matrices has no columns that correspond: take another kernel, 'features' or "
                "'gradients'"
            )
        if a.columns != b.columns:
            raise ValueError(
                "the columns of these sketches do not correspond: rows were projected, or f ⊗ g sketched, by other "
                "hashes; sketch both with one seed and one memory"
            )
        x, y = (kernel.rows * (self.size / kernel.n) ** 0.5 for kernel in (a, b))
        if x.device != y.device:  # the smaller moves
            x, y = (x.to(y.device), y) if x.numel() < y.numel() else (x, y.to(x.device))
        return PairedRows(SiteRows(x), SiteRows(y))

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        return self._of_sites(lambda kernel: kernel.gram.trace())

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """‖K‖² of each site."""
        return self._of_sites(lambda kernel: kernel.gram.square().sum())

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """The share of each kernel's trace that is variation about the mean."""
        return self._of_sites(lambda kernel: kernel.gram.trace() / kernel.raw_gram.trace())

    def _of_sites(self, number: Callable[[Kernel], Tensor]) -> tuple[Tensor, Tensor]:
        a, b = (torch.stack([number(kernel) for kernel in side]) for side in (self.a, self.b))
        return a, b

    def describe(self) -> str:
        if self.exact:
            return f"kernels of all {self.n} rows"
        counts = dict.fromkeys([self.a[0].n, self.b[0].n])
        return f"{' and '.join(map(str, counts))} rows, sketched to {self.size}"


@dataclass
class _KernelCovariances(Covariances):
    """Covariances of two kernels; their nuclear norm needs no eigenvectors, since no rotation changes it."""

    kernels: tuple[Kernel, Kernel] = field(kw_only=True, repr=False)

    @once
    def nuclear(self) -> Tensor:
        x, y = self.kernels
        with threads_for(x.factor):
            cross = product(x.factor.T, y.factor) / (x.n * y.n) ** 0.5
        return nuclear_norm(
            cross,
            most=self.x.trace.sqrt() * self.y.trace.sqrt(),
            enough=ENOUGH_DIGITS if torch.float64 in (x.dtype, y.dtype) else ENOUGH_DIGITS_FLOAT32,
        )


# Products of kernels (M, M), summed over the second bucket, and those on the diagonal: (M, …) each


def _products(ks: Sequence[Tensor], ls: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(M, A) each: of the first of A kernels with the first of A others, and so on."""
    products = [k * l for k, l in zip(ks, ls, strict=True)]
    return torch.stack([p.sum(1) for p in products], 1), torch.stack([p.diagonal() for p in products], 1)


def _all_products(ks: Sequence[Tensor], ls: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(M, A, B) each: of each of A kernels with each of B."""
    rows = torch.stack(list(ks), 1) @ torch.stack(list(ls), 2)  # (M, A, M) @ (M, M, B)
    a, b = (torch.stack([gram.diagonal() for gram in side], 1) for side in (ks, ls))
    return rows, a[:, :, None] * b[:, None, :]


def _without_each(rows: Tensor, diagonal: Tensor) -> Tensor:
    """(M, …): the sum over all pairs of buckets without those of each bucket, scaled to the full number of pairs.

    Off the diagonal, a bucket is in two pairs with each of the others.
    """
    m, beside = len(rows), rows - diagonal
    off_diagonal = m / (m - 2) * (beside.sum(0) - 2 * beside)
    return off_diagonal + m / (m - 1) * (diagonal.sum(0) - diagonal)


def _entries(grams: Sequence[Tensor]) -> Tensor:
    """(4, A): sums over Gram matrices that do not depend on the order of buckets.

    The sum of the diagonal, its sum of squares about the mean, and the sum and sum of squares of all other entries.
    """
    rows = []
    for gram in grams:
        diagonal = gram.diagonal()
        spread = (diagonal - diagonal.mean()).square().sum()
        beside = gram.sum() - diagonal.sum(), gram.square().sum() - diagonal.square().sum()
        rows.append(torch.stack([diagonal.sum(), spread, *beside]))
    return torch.stack(rows, 1)
