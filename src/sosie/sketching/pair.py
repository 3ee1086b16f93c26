"""Two sketches side by side: the views that measures read from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..linalg import ENOUGH_DIGITS, ENOUGH_DIGITS_FLOAT32, nuclear_norm, once, product, threads_for
from ..stats import Alignment, Covariances, DebiasedAlignment, PairedRows, Resketch, SiteRows, UncentredAlignment
from .kernels import Kernel

# Sums over buckets with each bucket left out in turn, brought to the number of terms that there were


def sums(terms: Tensor) -> Tensor:
    """(M, …): of one term a bucket (M, …)."""
    return len(terms) / (len(terms) - 1) * (terms.sum(0) - terms)


def sums_of_pairs(one: Tensor, other: Tensor) -> Tensor:
    """(M,): of the products of two kernels (M, M)."""
    products = one * other
    return _of_pairs(products.sum(1), products.diagonal())


def all_sums_of_pairs(own: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """(M, A, B): the same for each of A kernels with each of B."""
    rows = torch.stack(list(own), 1) @ torch.stack(list(other), 2)  # (M, A, M) @ (M, M, B)
    a, b = (torch.stack([gram.diagonal() for gram in side], 1) for side in (own, other))
    return _of_pairs(rows, a[:, :, None] * b[:, None, :])


def _of_pairs(rows: Tensor, diagonal: Tensor) -> Tensor:
    """From the sums over the second bucket of each pair: beside the diagonal a bucket takes two such sums with it."""
    m, beside = len(rows), rows - diagonal
    return m / (m - 2) * (beside.sum(0) - 2 * beside) + sums(diagonal)


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

    def redrawn(self, draw: Resketch) -> SketchPair:
        """The same with other buckets and signs for B: what two sketches give that share no rows."""
        return replace(self, b=[kernel.redrawn(draw) for kernel in self.b])

    def alignment(self, kind: type[Alignment]) -> Alignment:
        """Inner products of the kernels of every pair of sites."""
        if kind is DebiasedAlignment:
            return self._debiased()
        own, other = self._grams(kind)
        return kind(
            torch.stack([gram.square().sum() for gram in own])[:, None],
            torch.stack([gram.square().sum() for gram in other])[None, :],
            _products(own, other),
        )

    def _grams(self, kind: type[Alignment]) -> tuple[list[Tensor], list[Tensor]]:
        """The kernels of both sides, as they are or centred."""
        name = "raw_gram" if kind is UncentredAlignment else "gram"
        a, b = ([getattr(kernel, name) for kernel in side] for side in (self.a, self.b))
        return a, b

    def redrawn_moments(self, kind: type[Alignment], *, signed: bool) -> tuple[Tensor, Tensor | None]:
        """(A, B) each: mean and variance of xy over all draws of other buckets, and of other signs if they have any.

        Signs make what lies beside the diagonal 0 on average. Without them there is no simple variance.
        """
        x, y = map(_Entries.of, self._grams(kind))
        m = self.size
        mean = x.diagonal[:, None] * y.diagonal / m
        if not signed:
            return mean + x.beside[:, None] * y.beside / (m * (m - 1)), None
        variance = x.diagonal_spread[:, None] * y.diagonal_spread / (m - 1)
        return mean, variance + 2 * x.beside_squares[:, None] * y.beside_squares / (m * (m - 1))

    def _debiased(self) -> DebiasedAlignment:
        """What U-centred Gram matrices of all rows would give, estimated without the bias of either sketch.

        E⟨S K Sᵀ, S L Sᵀ⟩ = ⟨K, L⟩ (1 + 1/M) + (tr K tr L − 2 Σ Kᵢᵢ Lᵢᵢ) / M.
        """
        if self.n < 4:
            raise ValueError(f"the debiased alignment needs at least 4 rows, got {self.n}")
        a, b = ([_Known.of(kernel) for kernel in side] for side in (self.a, self.b))
        (traces_a, diagonals_a), (traces_b, diagonals_b) = (
            (torch.stack([k.trace for k in side]), torch.stack([k.diagonal for k in side])) for side in (a, b)
        )
        cross = _products([k.one for k in a], [k.other for k in b]) + _products(
            [k.other for k in a], [k.one for k in b]
        )

        def own(side: list[_Known]) -> Tensor:
            return torch.stack(
                [self._unbiased((k.one * k.other).sum(), k.trace**2, k.diagonal @ k.diagonal) for k in side]
            )

        return DebiasedAlignment(
            own(a)[:, None],
            own(b)[None, :],
            self._unbiased(cross / 2, traces_a[:, None] * traces_b, diagonals_a @ diagonals_b.T),
        )

    def _unbiased(self, products: Tensor, traces: Tensor, diagonals: Tensor) -> Tensor:
        n = self.n
        if not self.exact:
            products = (self.size * products - traces + 2 * diagonals) / (self.size + 1)
        return products - n / (n - 2) * diagonals + traces / ((n - 1) * (n - 2))

    def left_out(self, kind: type[Alignment]) -> Alignment:
        """xx (M, A, 1), yy (M, 1, B), xy (M, A, B): with each bucket left out, brought to as many as there are.

        Buckets are alike and next to independent, so that their spread tells that of the whole. Means were taken off
        before, and need not move.
        """
        if kind is not DebiasedAlignment:
            own, other = self._grams(kind)
            xx, yy = (torch.stack([sums_of_pairs(gram, gram) for gram in side], 1) for side in (own, other))
            return kind(xx[:, :, None], yy[:, None, :], all_sums_of_pairs(own, other))
        a, b = ([_Known.of(kernel) for kernel in side] for side in (self.a, self.b))
        (traces_a, diagonals_a), (traces_b, diagonals_b) = (
            (torch.stack([k.trace for k in side]), torch.stack([k.diagonal for k in side], 1)) for side in (a, b)
        )
        xx, yy = (torch.stack([sums_of_pairs(k.one, k.other) for k in side], 1) for side in (a, b))
        cross = all_sums_of_pairs([k.one for k in a], [k.other for k in b])
        cross = cross + all_sums_of_pairs([k.other for k in a], [k.one for k in b])
        return DebiasedAlignment(
            self._unbiased(xx, traces_a**2, sums(diagonals_a**2))[:, :, None],
            self._unbiased(yy, traces_b**2, sums(diagonals_b**2))[:, None, :],
            self._unbiased(
                cross / 2, traces_a[:, None] * traces_b, sums(diagonals_a[:, :, None] * diagonals_b[:, None, :])
            ),
        )

    def covariances(self, i: int, j: int) -> Covariances:
        """Of site i of A and site j of B, each in as few coordinates as its buckets span."""
        x, y = self.a[i], self.b[j]
        return _KernelCovariances(
            x.scatter, y.scatter, lambda: product(x.root.T, y.root) / (x.n * y.n) ** 0.5, kernels=(x, y)
        )

    def paired(self, i: int, j: int) -> PairedRows:
        """Buckets as rows, scaled so that their covariance is that of the rows; for measures that need no pairing."""
        _check_columns(self.a[i], self.b[j])
        x, y = (kernel.rows * (self.size / kernel.n) ** 0.5 for kernel in (self.a[i], self.b[j]))
        if x.device != y.device:  # the smaller one moves
            x, y = (x.to(y.device), y) if x.numel() < y.numel() else (x, y.to(x.device))
        return PairedRows(SiteRows(x), SiteRows(y))

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        a, b = (torch.stack([k.gram.trace() for k in side]) for side in (self.a, self.b))
        return a, b

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """‖K‖² of each site."""
        a, b = (torch.stack([k.gram.square().sum() for k in side]) for side in (self.a, self.b))
        return a, b

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """For each site, how much of the kernel's trace is variation about the mean."""
        a, b = (torch.stack([k.gram.trace() / k.raw_gram.trace() for k in side]) for side in (self.a, self.b))
        return a, b

    def describe(self) -> str:
        if self.exact:
            return f"kernels of all {self.n} rows"
        counts = list(dict.fromkeys([self.a[0].n, self.b[0].n]))
        rows = f"{' and '.join(map(str, counts))} rows"
        return f"{rows}, sketched to {self.size}"


@dataclass
class _KernelCovariances(Covariances):
    """Covariances of two kernels; a nuclear norm, which no rotation changes, needs no eigenvectors of either."""

    kernels: tuple[Kernel, Kernel] = field(kw_only=True, repr=False)

    @once
    def nuclear(self) -> Tensor:
        x, y = self.kernels
        rounded = torch.float64 not in (x.dtype, y.dtype)
        with threads_for(x.factor):
            cross = product(x.factor.T, y.factor) / (x.n * y.n) ** 0.5
        return nuclear_norm(
            cross,
            most=self.x.trace.sqrt() * self.y.trace.sqrt(),
            enough=ENOUGH_DIGITS_FLOAT32 if rounded else ENOUGH_DIGITS,
        )


@dataclass(frozen=True)
class _Entries:
    """What a random order of buckets leaves of each of several Gram matrices."""

    diagonal: Tensor  # Σ of the diagonal
    diagonal_spread: Tensor  # Σ (entry − mean)² of the diagonal
    beside: Tensor  # Σ of what is beside it
    beside_squares: Tensor

    @classmethod
    def of(cls, grams: Sequence[Tensor]) -> _Entries:
        rows = []
        for gram in grams:
            diagonal = gram.diagonal()
            spread = (diagonal - diagonal.mean()).square().sum()
            beside = gram.sum() - diagonal.sum(), gram.square().sum() - diagonal.square().sum()
            rows.append(torch.stack([diagonal.sum(), spread, *beside]))
        return cls(*torch.stack(rows).T)


@dataclass(frozen=True)
class _Known:
    """What takes the bias out of a sketched kernel."""

    one: Tensor  # (M, M): two independent estimates of it
    other: Tensor
    trace: Tensor
    diagonal: Tensor

    @classmethod
    def of(cls, kernel: Kernel) -> _Known:
        if kernel.trace is None or kernel.diagonal is None:
            raise ValueError(
                f"the kernel {kernel.name!r} does not tell how much sketching adds to it, so there is no debiased "
                "value: take linear_cka, or a sketch of every row (size=None)"
            )
        return cls(*kernel.half_grams, kernel.trace.double(), kernel.diagonal.double())


def _check_columns(x: Kernel, y: Kernel) -> None:
    """Raise unless the columns of one kernel's rows are those of the other's."""
    if not x.columns or not y.columns:
        raise ValueError(
            "a product of Gram matrices has no neurons, and no columns that correspond: take another kernel, "
            "'features' or 'gradients'"
        )
    if x.columns != y.columns:
        raise ValueError(
            "the columns of these sketches do not correspond: rows were projected, or f ⊗ g sketched, by other hashes; "
            "sketch both with one seed and one memory"
        )


def _products(own: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    a, b = (torch.stack([gram.flatten() for gram in side]) for side in (own, other))
    return a @ b.T
