"""Gram matrices of rows in memory: what one view computes is kept for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..linalg import diagonal_part, once, row_squares, self_product
from .from_rows import alignment, columns_are_cheaper, from_products, inner_products, products, without_mean
from .shuffle import Shuffle
from .views import Alignment, DebiasedAlignment, UncentredAlignment

# Inner products of Gram matrices with each group of rows left out in turn, for all groups at the price of one
#
# Leaving rows out of a Gram matrix takes entries away, and moves the mean that the rest is centred about. With
# rows centred over all, s the sum of those left out and m the number of those kept, the row sums of what is kept
# are −⟨x, s⟩ and their total ‖s‖², so that nothing but the entries themselves needs the Gram matrix.

Three = tuple[Tensor, Tensor, Tensor]


class GroupedProducts:
    """Inner products of the Gram matrices as they are, group of rows by group: row i is in group i modulo G."""

    def __init__(self, xs: Sequence[Tensor], ys: Sequence[Tensor], groups: int) -> None:
        n = len(xs[0])
        self.dealt = [torch.arange(group, n, groups, device=xs[0].device) for group in range(groups)]
        sizes = [len(out) for out in self.dealt]
        order = torch.cat(self.dealt)
        xs, ys = [x[order] for x in xs], [y[order] for y in ys]
        self._strips: list[Three] = []
        self._squares: list[Three] = []
        self._rows = [torch.zeros(len(side), n, dtype=torch.float64, device=order.device) for side in (xs, ys)]
        start = 0
        for g, size in enumerate(sizes):
            stop = start + size
            # Of the strip of rows of this group, the part that symmetry does not repeat.
            k, l = (torch.stack([(rows[start:stop] @ rows[start:].T).double() for rows in side]) for side in (xs, ys))
            squares = k.square(), l.square()
            for rows, square in zip(self._rows, squares, strict=True):
                rows[:, order[start:stop]] += square.sum(2)
                rows[:, order[stop:]] += square[:, :, size:].sum(1)
            parts = (part.split(sizes[g:], dim=2) for part in (k, l, *squares))
            for h, (a, b, aa, bb) in enumerate(zip(*parts, strict=True), start=g):
                block = aa.sum((1, 2))[:, None], bb.sum((1, 2))[None, :], a.flatten(1) @ b.flatten(1).T
                if h == g:
                    self._squares.append(block)
                for strip in {g, h}:  # what lies off the diagonal stands for its mirror image too
                    if strip == len(self._strips):
                        self._strips.append(block)
                    else:
                        self._strips[strip] = _each(lambda a, b: a + b, self._strips[strip], block)
            start = stop
        self._lengths = [
            torch.stack([row_squares(rows).double() for rows in side])[:, order.argsort()] for side in (xs, ys)
        ]

    @property
    def heaviest(self) -> tuple[Tensor, Tensor]:
        """(A,) and (B,): the largest share that one row has in ‖K‖²."""
        a, b = (
            ((2 * rows - lengths.square()) / rows.sum(1, keepdim=True)).amax(1)
            for rows, lengths in zip(self._rows, self._lengths, strict=True)
        )
        return a, b

    def whole(self) -> Three:
        return _each(lambda *parts: torch.stack(parts).sum(0), *self._strips)

    def without(self, group: int) -> Three:
        """A row that is left out takes its column with it, and the two cross in a square."""
        return _each(lambda a, b, c: a - 2 * b + c, self.whole(), self._strips[group], self._squares[group])


def _each(combine: Callable[..., Tensor], *threes: Three) -> Three:
    """What combines several xx, several yy and several xy."""
    xx, yy, xy = (combine(*parts) for parts in zip(*threes, strict=True))
    return xx, yy, xy


def left_out_alignment(
    xs: Sequence[Tensor], ys: Sequence[Tensor], kind: type[Alignment], groups: int, grouped: GroupedProducts | None
) -> Alignment:
    """xx (G, A, 1), yy (G, 1, B), xy (G, A, B): row i is in group i modulo G.

    The rows are centred, but for uncentred ones. From their products group by group, or else through covariances.
    """
    n, centre = len(xs[0]), kind is not UncentredAlignment
    dealt = [torch.arange(group, n, groups, device=xs[0].device) for group in range(groups)]
    if grouped is None:
        left = _by_columns(xs, ys, dealt, centre)
    else:
        left = [grouped.without(group) for group in range(groups)]
    if kind is DebiasedAlignment or (centre and grouped is not None):
        x, y = _Side(xs, dealt), _Side(ys, dealt)
        for group, out in enumerate(dealt):
            kept = torch.ones(n, dtype=torch.bool, device=out.device).index_fill(0, out, False)
            if grouped is not None:
                left[group] = _centred(left[group], x, y, group, kept)
            if kind is DebiasedAlignment:
                left[group] = _debiased(left[group], x.diagonals(group, kept), y.diagonals(group, kept))
    return kind(*_each(lambda *parts: torch.stack(parts), *left))


def _by_columns(xs: Sequence[Tensor], ys: Sequence[Tensor], dealt: Sequence[Tensor], centre: bool) -> list[Three]:
    """Through covariances about the mean of what is kept, all sites side by side."""
    xs, ys = [x.double() for x in xs], [y.double() for y in ys]
    x, y = torch.cat(xs, dim=1), torch.cat(ys, dim=1)
    of_y, shape = owners(ys), (len(xs), len(ys))
    whole, own = x.T @ y, [[self_product(rows) for rows in side] for side in (xs, ys)]
    left: list[Three] = []
    for out in dealt:
        squares = _less(whole, x[out], y[out], len(x), centre).square_()
        xx, yy = (
            torch.stack([_less(s, r[out], r[out], len(x), centre).square_().sum() for s, r in zip(*side, strict=True)])
            for side in zip(own, (xs, ys), strict=True)
        )
        by_x = torch.stack([part.sum(0) for part in squares.split([rows.shape[1] for rows in xs])])
        left.append((xx[:, None], yy[None, :], squares.new_zeros(shape).index_add(1, of_y, by_x)))
    return left


def _less(whole: Tensor, x: Tensor, y: Tensor, n: int, centre: bool) -> Tensor:
    """Σ x yᵀ without some of its n rows."""
    found = torch.addmm(whole, x.T, y, alpha=-1)
    return found.addr_(x.sum(0), y.sum(0), alpha=-1 / (n - len(x))) if centre else found


class _Side:
    """What moving the mean of one side takes: S sites, n centred rows, G groups."""

    def __init__(self, sites: Sequence[Tensor], dealt: Sequence[Tensor]) -> None:
        gone = [torch.stack([rows[out].sum(0, dtype=torch.float64) for out in dealt]) for rows in sites]
        self.sums = torch.stack([-rows.double() @ s.T for rows, s in zip(sites, gone, strict=True)])  # (S, n, G)
        self.totals = torch.stack([s.square().sum(1) for s in gone])  # (S, G)
        self.lengths = torch.stack([row_squares(rows.double()) for rows in sites])  # (S, n)

    def diagonals(self, group: int, kept: Tensor) -> Tensor:
        """(S, m): of the Gram matrices of the rows that are kept, centred about their mean."""
        sums = self.sums[:, kept, group]
        m = sums.shape[1]
        return self.lengths[:, kept] - 2 / m * sums + self.totals[:, group, None] / m**2


def _centred(found: Three, x: _Side, y: _Side, group: int, kept: Tensor) -> Three:
    r, c = x.sums[:, kept, group], y.sums[:, kept, group]
    m, rows, totals = r.shape[1], products(r, c), products(x.totals[:, group, None], y.totals[:, group, None])
    return _each(lambda f, s, t: f - 2 / m * s + t / m**2, found, rows, totals)


def _debiased(found: Three, k: Tensor, l: Tensor) -> Three:
    m, kappa, traces = k.shape[1], products(k, l), (k.sum(1)[:, None], l.sum(1)[None, :])
    of = (traces[0], traces[0]), (traces[1], traces[1]), traces
    xx, yy, xy = (f - diagonal_part(s, *t, m) for f, s, t in zip(found, kappa, of, strict=True))
    return xx, yy, xy


def owners(sites: Sequence[Tensor]) -> Tensor:
    """Which site each column belongs to, of all sites side by side."""
    widths = torch.tensor([site.shape[1] for site in sites])
    return torch.repeat_interleave(torch.arange(len(sites)), widths).to(sites[0].device)


GROUPS = 20  # that rows are dealt out to, to be left out in turn
SMALLEST_GROUP = 4  # rows
MANY_ROWS = 512  # from which on sums are made group by group even if only the total is asked for yet
GOING_THROUGH = 40  # multiply-adds that a look at an entry in memory is worth


class RowGrams:
    """Of paired rows of all sites of two sides."""

    def __init__(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        self.xs, self.ys = xs, ys
        self.groups = min(GROUPS, len(xs[0]) // SMALLEST_GROUP)
        self._views: dict[type[Alignment], Alignment] = {}
        self._products: dict[bool, tuple[Tensor, Tensor, Tensor]] = {}
        self._by_group: dict[bool, GroupedProducts] = {}

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
        """With each group of rows left out in turn: xx (G, A, 1), yy (G, 1, B), xy (G, A, B)."""
        centre = kind is not UncentredAlignment
        return left_out_alignment(*self._rows(centre), kind, self.groups, self._grouped(centre))

    @property
    def heaviest(self) -> tuple[Tensor, Tensor] | None:
        """The largest share that one row has in ‖K‖² of each site, where that is known."""
        grouped = self._by_group.get(True)
        return None if grouped is None else grouped.heaviest

    def _rows(self, centre: bool) -> tuple[list[Tensor], list[Tensor]]:
        xs, ys = ([without_mean(x) if centre else x for x in side] for side in (self.xs, self.ys))
        return xs, ys

    def _grouped(self, centre: bool) -> GroupedProducts | None:
        """Products group by group; none where covariances are cheaper."""
        if centre not in self._by_group and self._fewer_columns():
            return None
        if centre not in self._by_group:
            self._by_group[centre] = GroupedProducts(*self._rows(centre), self.groups)
        return self._by_group[centre]

    def _fewer_columns(self) -> bool:
        """Whether leaving groups out takes less work through covariances, which are gone through group by group."""
        n, p, q = len(self.xs[0]), [x.shape[1] for x in self.xs], [y.shape[1] for y in self.ys]
        entries = sum(p) * sum(q) + sum(w * w for w in (*p, *q))
        by_columns = entries * (n + GOING_THROUGH * self.groups)
        return by_columns < n * n / 2 * (sum(p) + sum(q) + GOING_THROUGH * (len(p) + len(q)))

    @once
    def own(self) -> tuple[Tensor, Tensor]:
        """‖K‖² of each site's U-centred Gram matrix, (A,) and (B,), without a look at the pairs."""
        if DebiasedAlignment in self._views:
            return self._views[DebiasedAlignment].xx[:, 0], self._views[DebiasedAlignment].yy[0]
        a, b = (
            torch.cat([RowGrams([x], [x]).alignment(DebiasedAlignment).xx[0] for x in s]) for s in (self.xs, self.ys)
        )
        return a, b


# Inner products of Gram matrices of all rows when the rows of one side are shuffled, many draws over


def shuffled_alignment(
    xs: Sequence[Tensor], ys: Sequence[Tensor], kind: type[Alignment], shuffles: Iterable[Shuffle]
) -> Alignment:
    """xx (A, 1) and yy (1, B) as they are, xy (D, A, B): one draw each."""
    whole = alignment(xs, ys, kind)
    if kind is not UncentredAlignment:
        xs, ys = [without_mean(x) for x in xs], [without_mean(y) for y in ys]
    shuffled = _shuffled_by_columns(xs, ys) if columns_are_cheaper(xs, ys) else _shuffled_by_rows(xs, ys)
    k, l = (torch.stack([rows.square().sum(1).double() for rows in side], dim=1) for side in (xs, ys))  # (n, sites)
    n, draws = len(k), []
    for shuffle in shuffles:
        xy = shuffled(shuffle)
        if kind is DebiasedAlignment:
            xy = xy - diagonal_part(k.T @ l[shuffle.order], k.sum(0)[:, None], l.sum(0)[None, :], n)
        draws.append(xy)
    return kind(whole.xx, whole.yy, torch.stack(draws))


def _shuffled_by_columns(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Callable[[Shuffle], Tensor]:
    """‖XᵀPY‖² of every pair of sites out of one product of all columns."""
    x, y = (torch.cat([rows.double() for rows in side], dim=1) for side in (xs, ys))
    of_x, of_y = (owners(side) for side in (xs, ys))

    def shuffled(shuffle: Shuffle) -> Tensor:
        squares = (x.T @ y[shuffle.order]).square()
        by_x = squares.new_zeros(len(xs), squares.shape[1]).index_add(0, of_x, squares)
        return by_x.new_zeros(len(xs), len(ys)).index_add(1, of_y, by_x)

    return shuffled


def _shuffled_by_rows(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Callable[[Shuffle], Tensor]:
    """⟨K, P L Pᵀ⟩ of every pair of sites out of one product of all Gram matrices."""
    k = torch.stack([(x @ x.T).double().flatten() for x in xs])
    ls = [(y @ y.T).double() for y in ys]
    return lambda shuffle: torch.stack([k @ shuffle(l, "square").flatten() for l in ls], dim=1)
