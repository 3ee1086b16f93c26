"""Views from rows in hand, by whichever of covariances and Gram matrices is cheaper; gradients flow through."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..linalg import (
    Spectrum,
    column_squares,
    cross_product,
    diagonal_part,
    for_numpy,
    once,
    row_squares,
    self_product,
    total_squares,
)
from .shuffle import Shuffle
from .views import Alignment, Covariances, DebiasedAlignment, Scatter, UncentredAlignment

NOTHING_LEFT = {torch.float64: 1e-12}  # share of ‖K‖² that is rounding, once its diagonal is taken off
NOTHING_LEFT_IN_FLOAT32 = 4e-6
STRIP = 512  # rows of a Gram matrix made at a time


@dataclass
class Coordinates:
    """One site's centred rows, in as few columns as they span, and their covariance."""

    rows: Tensor  # (n, r)
    scatter: Scatter
    _before: tuple[Coordinates, Shuffle] | None = field(default=None, repr=False)  # where shuffled rows come from

    @classmethod
    def of(cls, rows: Tensor, *, differentiable: bool) -> Coordinates:
        n, width = rows.shape
        # With gradients in the rows' own precision, which both sides share.
        rows = without_rounding(rows, torch.float64 if not differentiable else rows.dtype)
        if width <= n or differentiable:
            return cls(rows, Scatter(lambda: self_product(rows) / n, n, column_squares(rows).sum() / n))
        # More neurons than rows: n coordinates say as much, and all that reads them ignores rotations.
        spectrum = Spectrum.of(rows @ rows.T)
        scores = spectrum.vectors * spectrum.values.sqrt()
        return cls(scores, WideScatter(torch.diag(spectrum.values) / n, n, wide=rows))

    @once
    def basis(self) -> Tensor:
        """(n, k): orthonormal columns that span what the neurons span, a quiet one counting like a loud one."""
        if self._before is not None:
            original, shuffle = self._before
            return original.basis[shuffle.order]
        if isinstance(self.scatter, WideScatter):
            return self.scatter.basis
        return (self.rows / self.scatter.scale) @ self.scatter.whitener.T / self.scatter.n**0.5

    def shuffled(self, shuffle: Shuffle) -> Coordinates:
        return Coordinates(self.rows[shuffle.order], self.scatter, (self, shuffle))


@dataclass
class WideScatter(Scatter):
    """The covariance of a site with more neurons than rows: n principal coordinates stand for the neurons.

    Only what weighs neurons by their variance may read them, since a quiet neuron is lost in their rounding; what
    scales neurons first reads the rows.
    """

    wide: Tensor = field(kw_only=True, repr=False)  # (n, p) centred

    @once
    def basis(self) -> Tensor:
        lengths = self.wide.norm(dim=0)
        scaled = self.wide / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
        return Spectrum.of(scaled @ scaled.T).vectors

    @once
    def rank(self) -> Tensor:
        return torch.tensor(float(self.basis.shape[1]), dtype=self.matrix.dtype, device=self.matrix.device)

    @once
    def whitened_neurons(self) -> Tensor:
        return self.basis.T @ self.wide / self.n**0.5


@dataclass
class WideCovariances(Covariances):
    """Covariances where at least one side has more neurons than rows."""

    x_coordinates: Coordinates = field(kw_only=True, repr=False)
    y_coordinates: Coordinates = field(kw_only=True, repr=False)

    @once
    def whitened(self) -> Tensor:
        return self.x_coordinates.basis.T @ self.y_coordinates.basis

    @once
    def x_whitened(self) -> Tensor:
        return self.x_coordinates.basis.T @ self.y_coordinates.rows / self.x.n**0.5


def covariances(x: Coordinates, y: Coordinates) -> Covariances:
    """The covariances of one pair of sites."""
    xy = cross_product(x.rows, y.rows) / len(x.rows)
    if isinstance(x.scatter, WideScatter) or isinstance(y.scatter, WideScatter):
        return WideCovariances(x.scatter, y.scatter, xy, x_coordinates=x, y_coordinates=y)
    return Covariances(x.scatter, y.scatter, xy)


def alignment(xs: Sequence[Tensor], ys: Sequence[Tensor], kind: type[Alignment]) -> Alignment:
    """Inner products of the Gram matrices of all rows, for every pair of sites."""
    if kind is not UncentredAlignment:
        xs, ys = [without_mean(x) for x in xs], [without_mean(y) for y in ys]
    return from_products(inner_products(xs, ys), xs, ys, kind)


def from_products(
    found: tuple[Tensor, Tensor, Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], kind: type[Alignment]
) -> Alignment:
    """The view from the inner products of the Gram matrices of these rows, which are centred but for uncentred ones."""
    if kind is not DebiasedAlignment:
        return kind(*found)
    n = len(xs[0])
    if n < 4:
        raise ValueError(f"the debiased alignment needs at least 4 rows, got {n}")
    k, l = (torch.stack([row_squares(rows).double() for rows in side], dim=1) for side in (xs, ys))  # (n, sites)
    trace_x, trace_y = k.sum(0)[:, None], l.sum(0)[None, :]
    left_x = found[0] - diagonal_part(k.square().sum(0)[:, None], trace_x, trace_x, n)
    left_y = found[1] - diagonal_part(l.square().sum(0)[None, :], trace_y, trace_y, n)
    left = found[2] - diagonal_part(k.T @ l, trace_x, trace_y, n)
    # Rows that are all equally far apart leave nothing but rounding, which is like nothing else.
    least = min(NOTHING_LEFT.get(rows.dtype, NOTHING_LEFT_IN_FLOAT32) for rows in (*xs, *ys))
    some_x, some_y = (part.abs() > least * whole for part, whole in ((left_x, found[0]), (left_y, found[1])))
    nothing = left.new_zeros(())
    return DebiasedAlignment(
        torch.where(some_x, left_x, nothing),
        torch.where(some_y, left_y, nothing),
        torch.where(some_x & some_y, left, nothing),
    )


def without_rounding(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Centred rows, where a neuron that only rounding keeps from being constant counts as constant."""
    digits = rows.dtype if rows.dtype == torch.float64 else torch.float32  # that the rows came in
    found = without_mean(rows.to(dtype))
    if rows.is_cuda or _may_be_rounding(rows.detach(), found.detach(), digits):
        noise = 8 * torch.finfo(digits).eps * rows.detach().abs().amax(0)
        found = torch.where(found.detach().abs().amax(0) > noise, found, torch.zeros_like(found))
    return found


def _may_be_rounding(rows: Tensor, found: Tensor, digits: torch.dtype) -> bool:
    """Whether a neuron may vary by rounding alone; hardly ever, and means and variances are enough to rule it out."""
    # max |x − mean| is at least the standard deviation and at most √n times that.
    deviation = (column_squares(found) / len(found)).sqrt()
    largest = rows[0].abs() + 2 * len(rows) ** 0.5 * deviation
    return not bool((deviation > 9 * torch.finfo(digits).eps * largest).all())


def without_mean(rows: Tensor) -> Tensor:
    """Less the mean, which is taken in float64 so that a large offset costs no digits."""
    if not for_numpy(rows):
        return rows - rows.mean(0, keepdim=True, dtype=torch.float64).to(rows.dtype)
    array = rows.numpy()
    with np.errstate(all="ignore"):
        # NumPy adds up row by row, which loses digits where there are many: what is left of the mean goes second.
        found = array - array.mean(0, dtype=np.float64).astype(array.dtype)
        found -= found.mean(0, dtype=np.float64).astype(array.dtype)
    return torch.from_numpy(found)


def columns_are_cheaper(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Whether products of columns (covariances) take less work than products of rows (Gram matrices)."""
    n, p, q = len(xs[0]), [x.shape[1] for x in xs], [y.shape[1] for y in ys]
    by_columns = sum(p) * sum(q) + sum(w * w for w in (*p, *q))
    return by_columns <= n * (sum(p) + sum(q) + len(p) * len(q))


def inner_products(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """⟨Kx, Kx⟩ (A, 1), ⟨Ky, Ky⟩ (1, B) and ⟨Kx, Ky⟩ (A, B) for K = X Xᵀ."""
    dtype = functools.reduce(torch.promote_types, (rows.dtype for rows in (*xs, *ys)))
    xs, ys = [x.to(dtype) for x in xs], [y.to(dtype) for y in ys]
    if columns_are_cheaper(xs, ys):
        xx, yy = (torch.stack([total_squares(self_product(rows)) for rows in side]) for side in (xs, ys))
        xy = torch.stack([torch.stack([total_squares(cross_product(x, y)) for y in ys]) for x in xs])
        return xx[:, None], yy[None, :], xy
    return _by_strips(xs, ys)


def _by_strips(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The same through Gram matrices, a strip of rows at a time: all pairs of sites in one product."""
    n, sums = len(xs[0]), []
    for start in range(0, n, STRIP):
        size = min(STRIP, n - start)
        k, l = (
            torch.stack([(rows[start : start + size] @ rows[start:].T).double() for rows in side]) for side in (xs, ys)
        )
        # What lies beyond the square on the diagonal stands for its mirror image too.
        square = products(k[:, :, :size].flatten(1), l[:, :, :size].flatten(1))
        beyond = products(k[:, :, size:].flatten(1), l[:, :, size:].flatten(1))
        sums.append([a + 2 * b for a, b in zip(square, beyond, strict=True)])
    xx, yy, xy = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    return xx, yy, xy


def products(k: Tensor, l: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """⟨k, k⟩ (A, 1), ⟨l, l⟩ (1, B) and ⟨k, l⟩ (A, B) of vectors (A, length) and (B, length)."""
    return k.square().sum(1)[:, None], l.square().sum(1)[None, :], k @ l.T
