"""Views from rows in memory, by whichever of covariances and Gram matrices is cheaper; gradients flow through."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..linalg import (
    ENOUGH_VARIANCE,
    SMALLEST_DIRECTION,
    SMALLEST_DIRECTION_FLOAT32,
    Loss,
    Span,
    Spectrum,
    column_squares,
    cross_product,
    diagonal_part,
    for_numpy,
    leading_count,
    once,
    product,
    row_squares,
    self_product,
    singular_values,
    total_squares,
)
from .shuffle import Shuffle
from .views import Alignment, Covariances, DebiasedAlignment, Scatter, UncentredAlignment

NOTHING_LEFT = {torch.float64: 1e-12}  # share of ‖K‖² that is rounding, once its diagonal is taken off
NOTHING_LEFT_IN_FLOAT32 = 4e-6
OUTLIER = 1e3  # times the median length of a row: from there on a row may hide directions of the others
STRIP = 512  # rows of a Gram matrix made at a time


@dataclass
class RowScatter(Scatter):
    """The covariance of a site whose rows, or some of them, are in memory: to be factorised where it lacks digits."""

    raw: Tensor = field(kw_only=True, repr=False)  # (n, p) as they were given, or some of them

    @once
    def rows(self) -> Tensor:
        """(n, p) centred, in float64."""
        return without_rounding(self.raw, torch.float64)

    @once
    def direct(self) -> bool:
        """Whether neurons repeat one another so nearly that their covariance, which squares it, does not tell."""
        whitener, everywhere = self._whitening
        if self.sampled:  # all rows in sums are better than some, unless these lose what the data have
            return not everywhere and len(self.span.sizes) > int(Scatter.rank.make(self))
        return not everywhere or self.amplified * len(whitener) * ENOUGH_VARIANCE > 1

    @property
    def sampled(self) -> bool:
        """Whether the rows are fewer than those of the covariance."""
        return len(self.raw) < self.n

    @once
    def _limits(self) -> tuple[float, float]:
        """Shares of the largest direction from which on one counts, and below which it is rounding of the rows."""
        numbers = self.raw.double()
        narrow = bool((numbers == numbers.float()).all())  # carry float32's digits, whatever they are kept in
        eps = torch.finfo(torch.float32 if narrow else torch.float64).eps
        spread = self.rows.square().mean(0).sqrt()
        offset = float(torch.where(spread > 0, numbers.mean(0).abs() / spread, 0.0).max())
        rounding = eps * 2 * max(4.0, offset)
        if narrow:
            return SMALLEST_DIRECTION_FLOAT32, min(rounding, SMALLEST_DIRECTION_FLOAT32)
        least = max(SMALLEST_DIRECTION, 4 * rounding)
        return min(least, SMALLEST_DIRECTION_FLOAT32), max(rounding, max(self.raw.shape) * eps)

    @once
    def span(self) -> Span:
        """Of the neurons scaled to one size, so that a quiet one counts like a loud one."""
        return Span.of(_scaled(self.rows), *self._limits, self.present)

    @once
    def present(self) -> int:
        """Directions that the rows have once none is louder than most: an outlier hides the others in its rounding.

        0 where no row is so loud. Shrinking a row of [1, X] leaves its rank, one more than that of the centred rows.
        """
        numbers = _scaled(self.raw.double())
        sizes = numbers.norm(dim=1)
        if not bool((sizes > 0).any()):
            return 0
        usual = sizes[sizes > 0].median()
        if bool(sizes.max() <= OUTLIER * usual):
            return 0
        shrunk = torch.cat([torch.ones_like(numbers[:, :1]), numbers], 1) * (usual / sizes).clamp_max(1)[:, None]
        found = singular_values(_scaled(shrunk))
        return int((found > self._limits[0] * found[0]).sum()) - 1

    @once
    def components(self) -> Span:
        """Of the neurons as they are: the principal components, not yet scaled."""
        return Span.of(self.rows, *self._limits)

    @once
    def basis(self) -> Tensor:
        """(n, k): orthonormal columns that span what the neurons span."""
        return self.span.basis

    @once
    def rank(self) -> Tensor:
        return self.matrix.new_tensor(self.basis.shape[1]) if self.direct else Scatter.rank.make(self)

    @once
    def amplified(self) -> float:
        whitener, everywhere = self._whitening
        return float(whitener.square().sum()) if everywhere else self.span.condition

    def loss(self, rounding: float) -> Loss:
        return self.span.loss if self.direct else super().loss(rounding)

    def lacks_digits(self, share: float) -> bool:
        """Whether the covariance does not tell all of the leading directions that hold this share of the variance."""
        values = self.spectrum.values
        if self.sampled:
            return 1 - share < ENOUGH_VARIANCE and len(self.components.sizes) > len(values)
        count = leading_count(values, share)
        if bool(values[count - 1] < ENOUGH_VARIANCE * values[0]):
            return True
        return 1 - share < ENOUGH_VARIANCE and len(values) < self.raw.shape[1]

    def leading_count(self, share: float) -> int:
        if not self.lacks_digits(share):
            return super().leading_count(share)
        return leading_count(self.components.sizes.square(), share)


@dataclass
class WideScatter(RowScatter):
    """The covariance of a site with more neurons than rows: n principal coordinates stand for the neurons.

    Only what weighs neurons by their variance may read them, since a quiet neuron is lost in their rounding; what
    scales neurons first reads the rows.
    """

    @once
    def direct(self) -> bool:
        return True

    @once
    def basis(self) -> Tensor:
        scaled = _scaled(self.rows)
        spectrum = Spectrum.of(scaled @ scaled.T, ENOUGH_VARIANCE)
        # Centring alone takes one direction away; where more are missing, the rows themselves say which are there.
        return spectrum.vectors if spectrum.rank >= self.n - 1 else self.span.basis

    @once
    def rank(self) -> Tensor:
        return self.matrix.new_tensor(self.basis.shape[1])

    @once
    def amplified(self) -> float:
        return self.span.condition

    def loss(self, rounding: float) -> Loss:
        rank = self.basis.shape[1]
        return Loss(0, rank, 1.0) if rank >= self.n - 1 else self.span.loss


@dataclass
class Coordinates:
    """One site's centred rows, in as few columns as they span, and their covariance."""

    rows: Tensor  # (n, r)
    scatter: Scatter
    order: Tensor | None = None  # of the rows, where they were shuffled

    @classmethod
    def of(cls, raw: Tensor, *, differentiable: bool) -> Coordinates:
        n, width = raw.shape
        if differentiable:  # in the rows' own precision, which both sides share
            rows = without_rounding(raw, raw.dtype)
            return cls(rows, Scatter(lambda: self_product(rows) / n, n, column_squares(rows).sum() / n))
        if width <= n:
            scatter = RowScatter(lambda: self_product(scatter.rows) / n, n, raw=raw)
            scatter.total = column_squares(scatter.rows).sum() / n
            return cls(scatter.rows, scatter)
        # More neurons than rows: n coordinates say as much, and all that reads them ignores rotations.
        rows = without_rounding(raw, torch.float64)
        spectrum = Spectrum.of(rows @ rows.T)
        wide = WideScatter(torch.diag(spectrum.values) / n, n, raw=raw)
        return cls(spectrum.vectors * spectrum.values.sqrt(), wide)

    def shuffled(self, shuffle: Shuffle) -> Coordinates:
        return Coordinates(self.rows[shuffle.order], self.scatter, shuffle.order)


@dataclass
class RowCovariances(Covariances):
    """Covariances of sites whose rows are in memory, for what the covariances do not show."""

    x: RowScatter
    y: RowScatter
    order: Tensor | None = field(default=None, kw_only=True, repr=False)  # of the rows of y, where they were shuffled

    @once
    def whitened(self) -> Tensor:
        if self.x.direct or self.y.direct:
            return product(self.x.basis.T, self._of_y(self.y.basis))
        return Covariances.whitened.make(self)

    @once
    def whitened_neurons(self) -> Tensor:
        if self.x.direct or self.y.direct:
            return product(self.x.basis.T, self.x.rows) / len(self.x.rows) ** 0.5
        return Covariances.whitened_neurons.make(self)

    @once
    def x_whitened(self) -> Tensor:
        if self.x.direct:
            found = product(self.x.basis.T, self._of_y(self.y.rows)) / len(self.x.rows) ** 0.5
            # A share of the variance of the sampled rows; what divides by the variance knows that of all rows.
            return found * (self.y.trace / row_squares(self.y.rows).mean()).sqrt() if self.y.sampled else found
        return Covariances.x_whitened.make(self)

    def principal(self, share: float) -> tuple[Tensor, Tensor, Tensor] | None:
        if not (self.x.lacks_digits(share) or self.y.lacks_digits(share)):
            return None
        x, y = self.x.components, self.y.components
        sizes = (side.sizes / len(self.x.rows) ** 0.5 for side in (x, y))
        return product(x.basis.T, self._of_y(y.basis)), *sizes

    def _of_y(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else rows[self.order]


def covariances(x: Coordinates, y: Coordinates) -> Covariances:
    """The covariances of one pair of sites."""
    return between(x.scatter, y.scatter, cross_product(x.rows, y.rows) / len(x.rows), y.order)


def between(x: Scatter, y: Scatter, xy: Tensor, order: Tensor | None = None) -> Covariances:
    """The view of two sides and their cross-covariance, which can go back to the rows where they are in memory."""
    if isinstance(x, RowScatter) and isinstance(y, RowScatter):
        return RowCovariances(x, y, xy, order=order)
    return Covariances(x, y, xy)


def with_rows(scatter: Scatter, raw: Tensor) -> Scatter:
    """A covariance with the rows that it was made of, or a sample; of more neurons than rows it is left as it is."""
    n, width = raw.shape
    return RowScatter(scatter.given, scatter.n, raw=raw) if width <= n else scatter


def _scaled(rows: Tensor) -> Tensor:
    """Columns of length 1, but for those that are 0."""
    lengths = rows.norm(dim=0)
    return rows / torch.where(lengths > 0, lengths, torch.ones_like(lengths))


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
