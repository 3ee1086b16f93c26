"""Gram matrices of rows in memory: inner products for all pairs of sites, also with rows left out or shuffled.

Each is computed through Gram matrices (n, n) or through covariances (p, q), whichever is cheaper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg.grams import diagonal_part, without_mean
from ..linalg.products import (
    cross_product,
    once,
    row_squares,
    self_product,
    self_product_squares,
    side_by_side,
    total_squares,
)
from ..process_state import torch_on_all_cores
from .sampling import Moves, Shuffle, dealt_evenly
from .views import Alignment, DebiasedAlignment, RowScatter, SiteRows, UncentredAlignment

GROUPS = 20  # of rows, to be left out in turn
SMALLEST_GROUP = 4  # rows
MANY_ROWS = 512  # from which sums are made by group even if only the total is needed yet
PASS_COST = 40  # multiply-adds that reading an entry from memory costs
STRIP = 512  # rows of a Gram matrix made at a time

Sites = Sequence[Tensor]  # (n, p) each: the rows of all sites of one side
Products = tuple[Tensor, Tensor, Tensor]  # ⟨Kx, Kx⟩ (A, 1), ⟨Ky, Ky⟩ (1, B) and ⟨Kx, Ky⟩ (A, B)


class RowGrams:
    """Gram matrices of paired rows of all sites of two sides; views share their products."""

    def __init__(self, xs: Sites, ys: Sites) -> None:
        self.xs, self.ys = xs, ys
        self.groups = min(GROUPS, len(xs[0]) // SMALLEST_GROUP)
        self._views: dict[type[Alignment], Alignment] = {}
        self._products: dict[bool, Products] = {}
        self._by_group: dict[bool, GroupProducts] = {}

    def alignment(self, kind: type[Alignment]) -> Alignment:
        if kind not in self._views:
            centre = kind is not UncentredAlignment
            xs, ys = self._rows(centre)
            if centre not in self._products:
                plain = len(xs[0]) < MANY_ROWS or any(rows.requires_grad for rows in (*xs, *ys))
                grouped = None if plain or columns_are_cheaper(xs, ys) else self._grouped(centre)
                self._products[centre] = inner_products(xs, ys) if grouped is None else grouped.whole()
            self._views[kind] = from_products(self._products[centre], xs, ys, kind)
        return self._views[kind]

    def left_out(self, kind: type[Alignment]) -> Alignment:
        """The alignment with each group of rows left out in turn: xx (G, A, 1), yy (G, 1, B), xy (G, A, B)."""
        centre = kind is not UncentredAlignment
        (xs, ys), grouped = self._rows(centre), self._grouped(centre)
        left = _without_by_columns(xs, ys, self._dealt, centre) if grouped is None else grouped.without_each()
        if kind is DebiasedAlignment or (centre and grouped is not None):
            x, y = (_MeanShift(side, self._dealt) for side in (xs, ys))
            if grouped is not None:
                left = _about_new_means(left, x, y)
            if kind is DebiasedAlignment:
                left = debiased(left, x.diagonals, y.diagonals, x.kept)
        return kind(*left)

    def shuffled(self, kind: type[Alignment], shuffles: Iterable[Shuffle]) -> Alignment:
        """The alignment for draws of shuffled rows: xx (A, 1), yy (1, B), xy (D, A, B)."""
        whole = self.alignment(kind)
        xs, ys = self._rows(kind is not UncentredAlignment)
        shuffled = _shuffled_by_columns(xs, ys) if columns_are_cheaper(xs, ys) else _shuffled_by_rows(xs, ys)
        k, l = _diagonals(xs), _diagonals(ys)
        draws = []
        for shuffle in shuffles:
            xy = shuffled(shuffle)
            if kind is DebiasedAlignment:
                xy = xy - diagonal_part(k @ l[:, shuffle.order].T, k.sum(1)[:, None], l.sum(1)[None, :], k.shape[1])
            draws.append(xy)
        return kind(whole.xx, whole.yy, torch.stack(draws))

    @property
    def heaviest(self) -> tuple[Tensor, Tensor] | None:
        """The largest share of one row in ‖K‖² of each site, if it is known."""
        grouped = self._by_group.get(True)
        return None if grouped is None else grouped.heaviest

    @once
    def own(self) -> tuple[Tensor, Tensor]:
        """‖K‖² of each site's U-centred Gram matrix, (A,) and (B,), without computing pairs."""
        if view := self._views.get(DebiasedAlignment):
            return view.xx[:, 0], view.yy[0]
        a, b = (
            torch.cat([RowGrams([x], [x]).alignment(DebiasedAlignment).xx[0] for x in s]) for s in (self.xs, self.ys)
        )
        return a, b

    def _rows(self, centre: bool) -> tuple[list[Tensor], list[Tensor]]:
        xs, ys = ([without_mean(x) if centre else x for x in side] for side in (self.xs, self.ys))
        return xs, ys

    @once
    def _dealt(self) -> list[Tensor]:
        """The rows of each group."""
        group = dealt_evenly(len(self.xs[0]), self.groups).to(self.xs[0].device)
        return [(group == g).nonzero().flatten() for g in range(self.groups)]

    def _grouped(self, centre: bool) -> GroupProducts | None:
        """Products by group; None if covariances are cheaper."""
        if centre not in self._by_group:
            n, p, q = len(self.xs[0]), [x.shape[1] for x in self.xs], [y.shape[1] for y in self.ys]
            entries = sum(p) * sum(q) + sum(w * w for w in (*p, *q))
            by_columns = entries * (n + PASS_COST * self.groups)
            if by_columns < n * n / 2 * (sum(p) + sum(q) + PASS_COST * (len(p) + len(q))):
                return None
            self._by_group[centre] = GroupProducts(*self._rows(centre), self._dealt)
        return self._by_group[centre]


# Views of every pair of sites at once, for measures that need no more than inner products of what each site gives

ENTRIES = 2**16  # of each site that are multiplied at a time


@dataclass
class AllPairedRows:
    """What `PairedRows` offers that can be had for all pairs of sites at once."""

    sites: tuple[Sequence[SiteRows], Sequence[SiteRows]]
    inputs: SiteRows | None = None

    @property
    def n(self) -> int:
        return len(self.sites[0][0].rows)

    def inner(self, key: object, make: Callable[[Tensor], Tensor], moves: Moves | None = None) -> Tensor:
        """(A, B): see `PairedRows.inner`."""
        xs, ys = (
            [made.flatten() for made in side_by_side(lambda site: site.memo(key, make, moves), side)]
            for side in self.sites
        )
        total = xs[0].new_zeros(len(xs), len(ys))
        for start in range(0, len(xs[0]), ENTRIES):
            x, y = (torch.stack([each[start : start + ENTRIES] for each in side]) for side in (xs, ys))
            total += x @ y.T
        return total

    @property
    def x(self) -> SiteRows:
        raise ValueError("this value is computed for one pair of sites at a time")


@dataclass
class SiteSums:
    """Numbers of each site of one side, which broadcast over pairs of sites."""

    n: int
    trace: Tensor
    rank: Tensor


@dataclass
class AllCovariances:
    """What `Covariances` offers that can be had for all pairs of sites at once; `order` is of the rows of B."""

    sites: tuple[Sequence[RowScatter], Sequence[RowScatter]]
    order: Tensor | None = None

    @once
    def x(self) -> SiteSums:
        return self._sums(0, (-1, 1))

    @once
    def y(self) -> SiteSums:
        return self._sums(1, (1, -1))

    @once
    def shared(self) -> Tensor:
        """(A, B): see `Covariances.shared`."""
        return self._products([s.space.columns for s in self._spanned(0)], [s.space.columns for s in self._spanned(1)])

    @once
    def explained(self) -> Tensor:
        return self._products([s.space.columns for s in self._spanned(0)], [s.rows for s in self.sites[1]]) / self.x.n

    @once
    def between(self) -> Tensor:
        xs, ys = ([s.coordinates for s in side if s.coordinates is not None] for side in self.sites)
        return self._products(xs, ys) / self.x.n**2

    def _products(self, xs: Sites, ys: Sites) -> Tensor:
        return inner_products(xs, ys if self.order is None else [y[self.order] for y in ys])[2]

    def _sums(self, side: int, shape: tuple[int, int]) -> SiteSums:
        sites = self._spanned(side)
        trace, rank = (
            torch.stack(numbers).view(shape) for numbers in zip(*((s.trace, s.rank) for s in sites), strict=True)
        )
        return SiteSums(sites[0].n, trace, rank)

    def _spanned(self, side: int) -> Sequence[RowScatter]:
        for _ in side_by_side(lambda site: (site.space, site.rank), self.sites[side]):
            pass
        return self.sites[side]


# All rows


def from_products(biased: Products, xs: Sites, ys: Sites, kind: type[Alignment]) -> Alignment:
    """The view from the inner products of the Gram matrices of these rows, centred unless the view is uncentred."""
    if kind is not DebiasedAlignment:
        return kind(*biased)
    n = len(xs[0])
    if n < 4:
        raise ValueError(f"the debiased alignment needs at least 4 rows, got {n}")
    xx, yy, xy = debiased(biased, _diagonals(xs), _diagonals(ys), n)
    # Rows that are all equally far apart leave nothing but rounding.
    least = min(nothing_left(rows.dtype) for rows in (*xs, *ys))
    some_x, some_y = xx.abs() > least * biased[0], yy.abs() > least * biased[1]
    zero = xy.new_zeros(())
    return DebiasedAlignment(
        torch.where(some_x, xx, zero), torch.where(some_y, yy, zero), torch.where(some_x & some_y, xy, zero)
    )


def nothing_left(dtype: torch.dtype) -> float:
    """The share of ‖K‖² that is rounding once the diagonal is removed."""
    return 1e-12 if dtype == torch.float64 else 4e-6


def debiased(biased: Products, k: Tensor, l: Tensor, n: int | Tensor) -> Products:
    """Inner products of U-centred Gram matrices from those of centred ones with diagonals k (…, A, n), l (…, B, n)."""
    trace_x, trace_y = k.sum(-1)[..., :, None], l.sum(-1)[..., None, :]
    traces = (trace_x, trace_x), (trace_y, trace_y), (trace_x, trace_y)
    xx, yy, xy = (b - diagonal_part(s, *t, n) for b, s, t in zip(biased, products(k, l), traces, strict=True))
    return xx, yy, xy


def _diagonals(sites: Sites) -> Tensor:
    """(S, n): the diagonals of the Gram matrices, ‖x‖² of each row of each site."""
    return torch.stack([row_squares(rows).double() for rows in sites])


def products(k: Tensor, l: Tensor) -> Products:
    """⟨k, k⟩ (…, A, 1), ⟨l, l⟩ (…, 1, B) and ⟨k, l⟩ (…, A, B) of vectors (…, A, length) and (…, B, length)."""
    return k.square().sum(-1)[..., :, None], l.square().sum(-1)[..., None, :], k @ l.mT


def columns_are_cheaper(xs: Sites, ys: Sites) -> bool:
    """Return whether covariances take less work than Gram matrices."""
    n, p, q = len(xs[0]), [x.shape[1] for x in xs], [y.shape[1] for y in ys]
    by_columns = sum(p) * sum(q) + sum(w * w for w in (*p, *q))
    return by_columns <= n * (sum(p) + sum(q) + len(p) * len(q))


def inner_products(xs: Sites, ys: Sites) -> Products:
    """Inner products of K = X Xᵀ for every pair of sites."""
    dtype = functools.reduce(torch.promote_types, (rows.dtype for rows in (*xs, *ys)))
    xs, ys = [x.to(dtype) for x in xs], [y.to(dtype) for y in ys]
    if columns_are_cheaper(xs, ys):
        xx, yy = (torch.stack([self_product_squares(rows) for rows in side]) for side in (xs, ys))
        xy = torch.stack([torch.stack([total_squares(cross_product(x, y)) for y in ys]) for x in xs])
        return xx[:, None], yy[None, :], xy
    return _by_strips(xs, ys)


@torch_on_all_cores()
def _by_strips(xs: Sites, ys: Sites) -> Products:
    n, sums = len(xs[0]), []
    for start in range(0, n, STRIP):  # a strip of the Gram matrices at a time, with all pairs of sites in one product
        stop = min(start + STRIP, n)
        k, l = (torch.stack([(rows[start:stop] @ rows[start:].T).double() for rows in side]) for side in (xs, ys))
        # Entries beyond the square on the diagonal count twice, for their mirror image too.
        size = stop - start
        square = products(k[:, :, :size].flatten(1), l[:, :, :size].flatten(1))
        beyond = products(k[:, :, size:].flatten(1), l[:, :, size:].flatten(1))
        sums.append([a + 2 * b for a, b in zip(square, beyond, strict=True)])
    xx, yy, xy = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    return xx, yy, xy


# Each group of rows left out in turn, for all G groups at the price of one
#
# Leaving rows out of a Gram matrix removes entries, and moves the mean about which the rest is centred. With rows
# centred over all, s the sum of the rows left out and m the number of rows kept, the row sums of the kept entries are
# −⟨x, s⟩ and their total is ‖s‖², so that only the entries themselves need the Gram matrix.


class GroupProducts:
    """Inner products of the Gram matrices by group of rows."""

    @torch_on_all_cores()
    def __init__(self, xs: Sites, ys: Sites, dealt: Sequence[Tensor]) -> None:
        order, sizes = torch.cat(list(dealt)), [len(rows) for rows in dealt]
        xs, ys = [x[order] for x in xs], [y[order] for y in ys]
        shapes = (len(dealt), len(xs), 1), (len(dealt), 1, len(ys)), (len(dealt), len(xs), len(ys))
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=order.device)
        self._strips = [zeros(shape) for shape in shapes]  # of the rows of each group with all rows
        self._squares = [zeros(shape) for shape in shapes]  # of the rows of each group with each other
        self._rows = [zeros(len(side), len(order)) for side in (xs, ys)]  # (S, n): Σⱼ Kᵢⱼ²
        start = 0
        for g, size in enumerate(sizes):
            stop = start + size
            # The strip of rows of this group, without what symmetry repeats.
            k, l = (torch.stack([(rows[start:stop] @ rows[start:].T).double() for rows in side]) for side in (xs, ys))
            squares = k.square(), l.square()
            for rows, square in zip(self._rows, squares, strict=True):
                rows[:, order[start:stop]] += square.sum(2)
                rows[:, order[stop:]] += square[:, :, size:].sum(1)
            parts = (part.split(sizes[g:], dim=2) for part in (k, l, *squares))
            for h, (a, b, aa, bb) in enumerate(zip(*parts, strict=True), start=g):
                block = aa.sum((1, 2))[:, None], bb.sum((1, 2))[None, :], a.flatten(1) @ b.flatten(1).T
                for strip, square, part in zip(self._strips, self._squares, block, strict=True):
                    strip[g] += part
                    if h == g:
                        square[g] = part
                    else:  # for the mirror image
                        strip[h] += part
            start = stop
        self._lengths = [_diagonals(side)[:, order.argsort()] for side in (xs, ys)]

    @property
    def heaviest(self) -> tuple[Tensor, Tensor]:
        """(A,) and (B,): the largest share of one row in ‖K‖²."""
        a, b = (
            ((2 * rows - lengths.square()) / rows.sum(1, keepdim=True)).amax(1)
            for rows, lengths in zip(self._rows, self._lengths, strict=True)
        )
        return a, b

    def whole(self) -> Products:
        xx, yy, xy = (strips.sum(0) for strips in self._strips)
        return xx, yy, xy

    def without_each(self) -> Products:
        """(G, …): a row is left out with its column, and the two cross in a square."""
        both = zip(self._strips, self._squares, strict=True)
        xx, yy, xy = (strips.sum(0) - 2 * strips + squares for strips, squares in both)
        return xx, yy, xy


class _MeanShift:
    """The sums that move the mean of one side when each of G groups is left out: S sites, n centred rows."""

    @torch_on_all_cores()
    def __init__(self, sites: Sites, dealt: Sequence[Tensor]) -> None:
        left_out = [torch.stack([rows[out].sum(0, dtype=torch.float64) for out in dealt]) for rows in sites]
        present = torch.ones(len(dealt), 1, len(sites[0]), dtype=torch.bool, device=sites[0].device)
        for group, out in enumerate(dealt):
            present[group, 0, out] = False
        self._sites, self._present = sites, present
        self.kept = present.sum(2, keepdim=True).double()  # (G, 1, 1): the number of rows kept
        sums = torch.stack([-s @ rows.double().T for rows, s in zip(sites, left_out, strict=True)], dim=1)
        self.sums = sums.mul_(present)  # (G, S, n): row sums of the Gram matrices, 0 for rows left out
        self.totals = torch.stack([s.square().sum(1) for s in left_out], dim=1)[..., None]  # (G, S, 1): their totals

    @property
    def diagonals(self) -> Tensor:
        """(G, S, n): of the Gram matrices, centred about the mean of the kept rows; 0 for rows left out."""
        lengths = torch.stack([row_squares(rows.double()) for rows in self._sites])
        return (lengths - 2 / self.kept * self.sums + self.totals / self.kept**2).mul_(self._present)


def _about_new_means(left: Products, x: _MeanShift, y: _MeanShift) -> Products:
    """Inner products of the Gram matrices of the kept rows, about their mean."""
    parts = zip(left, products(x.sums, y.sums), products(x.totals, y.totals), strict=True)
    xx, yy, xy = (part - 2 / x.kept * sums + totals / x.kept**2 for part, sums, totals in parts)
    return xx, yy, xy


def _without_by_columns(xs: Sites, ys: Sites, dealt: Sequence[Tensor], centre: bool) -> Products:
    """Through covariances about the mean of the kept rows, all sites side by side."""
    xs, ys = [x.double() for x in xs], [y.double() for y in ys]
    x, y = torch.cat(xs, dim=1), torch.cat(ys, dim=1)
    of_y, shape = _owners(ys), (len(xs), len(ys))
    cross, selves = x.T @ y, [[self_product(rows) for rows in side] for side in (xs, ys)]

    def squares(whole: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """(Σ x yᵀ)² without these rows."""
        left = torch.addmm(whole, x.T, y, alpha=-1)
        if centre:
            left.addr_(x.sum(0), y.sum(0), alpha=-1 / (len(xs[0]) - len(x)))
        return left.square_()

    groups = []
    for out in dealt:
        entries = squares(cross, x[out], y[out])
        xx, yy = (
            torch.stack([squares(s, rows[out], rows[out]).sum() for s, rows in zip(*side, strict=True)])
            for side in zip(selves, (xs, ys), strict=True)
        )
        by_x = torch.stack([part.sum(0) for part in entries.split([rows.shape[1] for rows in xs])])
        groups.append((xx[:, None], yy[None, :], entries.new_zeros(shape).index_add(1, of_y, by_x)))
    all_xx, all_yy, all_xy = (torch.stack(parts) for parts in zip(*groups, strict=True))
    return all_xx, all_yy, all_xy


def _owners(sites: Sites) -> Tensor:
    """The site of each column, of all sites side by side."""
    widths = torch.tensor([site.shape[1] for site in sites])
    return torch.repeat_interleave(torch.arange(len(sites)), widths).to(sites[0].device)


# The rows of one side shuffled, in many draws


def _shuffled_by_columns(xs: Sites, ys: Sites) -> Callable[[Shuffle], Tensor]:
    """‖XᵀPY‖² of every pair of sites out of one product of all columns."""
    x, y = (torch.cat([rows.double() for rows in side], dim=1) for side in (xs, ys))
    of_x, of_y = _owners(xs), _owners(ys)

    def shuffled(shuffle: Shuffle) -> Tensor:
        squares = (x.T @ y[shuffle.order]).square()
        by_x = squares.new_zeros(len(xs), squares.shape[1]).index_add(0, of_x, squares)
        return by_x.new_zeros(len(xs), len(ys)).index_add(1, of_y, by_x)

    return shuffled


def _shuffled_by_rows(xs: Sites, ys: Sites) -> Callable[[Shuffle], Tensor]:
    """⟨K, P L Pᵀ⟩ of every pair of sites out of one product of all Gram matrices."""
    k = torch.stack([(x @ x.T).double().flatten() for x in xs])
    ls = [(y @ y.T).double() for y in ys]
    return lambda shuffle: torch.stack([k @ shuffle(l, "square").flatten() for l in ls], dim=1)
