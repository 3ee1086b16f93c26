"""Inner products of Gram matrices with each group of rows left out in turn, for all groups at the price of one.

Leaving rows out of a Gram matrix takes entries away, and moves the mean that the rest is centred about. With
rows centred over all, s the sum of those left out and m the number of those kept, the row sums of what is kept
are −⟨x, s⟩ and their total ‖s‖², so that nothing but the entries themselves needs the Gram matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linalg import diagonal_part, row_squares, self_product
from .from_rows import products
from .views import Alignment, DebiasedAlignment, UncentredAlignment

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
                    self._add(strip, block)
            start = stop
        self._lengths = [
            torch.stack([row_squares(rows).double() for rows in side])[:, order.argsort()] for side in (xs, ys)
        ]

    def _add(self, group: int, block: Three) -> None:
        if group == len(self._strips):
            self._strips.append(block)
        else:
            xx, yy, xy = (a + b for a, b in zip(self._strips[group], block, strict=True))
            self._strips[group] = xx, yy, xy

    @property
    def heaviest(self) -> tuple[Tensor, Tensor]:
        """(A,) and (B,): the largest share that one row has in ‖K‖²."""
        a, b = (
            ((2 * rows - lengths.square()) / rows.sum(1, keepdim=True)).amax(1)
            for rows, lengths in zip(self._rows, self._lengths, strict=True)
        )
        return a, b

    def whole(self) -> Three:
        xx, yy, xy = (torch.stack(parts).sum(0) for parts in zip(*self._strips, strict=True))
        return xx, yy, xy

    def without(self, group: int) -> Three:
        """A row that is left out takes its column with it, and the two cross in a square."""
        gone = zip(self.whole(), self._strips[group], self._squares[group], strict=True)
        xx, yy, xy = (whole - 2 * strip + square for whole, strip, square in gone)
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
    xx, yy, xy = (torch.stack(parts) for parts in zip(*left, strict=True))
    return kind(xx, yy, xy)


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
        left.append((xx[:, None], yy[None, :], squares.new_zeros(shape).index_add(1, of_y, _by_site(squares, xs))))
    return left


def _by_site(squares: Tensor, xs: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.sum(0) for part in squares.split([x.shape[1] for x in xs])])


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
    xx, yy, xy = (f - 2 / m * s + t / m**2 for f, s, t in zip(found, rows, totals, strict=True))
    return xx, yy, xy


def _debiased(found: Three, k: Tensor, l: Tensor) -> Three:
    m, kappa, traces = k.shape[1], products(k, l), (k.sum(1)[:, None], l.sum(1)[None, :])
    of = (traces[0], traces[0]), (traces[1], traces[1]), traces
    xx, yy, xy = (f - diagonal_part(s, *t, m) for f, s, t in zip(found, kappa, of, strict=True))
    return xx, yy, xy


def owners(sites: Sequence[Tensor]) -> Tensor:
    """Which site each column belongs to, of all sites side by side."""
    widths = torch.tensor([site.shape[1] for site in sites])
    return torch.repeat_interleave(torch.arange(len(sites)), widths).to(sites[0].device)
