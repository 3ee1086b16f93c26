"""Inner products of Gram matrices with each group of rows left out in turn, for all groups at the price of one.

Leaving rows out of a Gram matrix takes entries away, and moves the mean that the rest is centred about. With
rows centred over all, s the sum of those left out and m the number of those kept, the row sums of what is kept
are −⟨x, s⟩ and their total ‖s‖², so that nothing but the entries themselves needs the Gram matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linalg import diagonal_part, self_product
from .from_rows import columns_are_cheaper, products, without_mean
from .views import Alignment, DebiasedAlignment, UncentredAlignment

Three = tuple[Tensor, Tensor, Tensor]


def left_out_alignment(xs: Sequence[Tensor], ys: Sequence[Tensor], kind: type[Alignment], groups: int) -> Alignment:
    """xx (G, A, 1), yy (G, 1, B), xy (G, A, B): row i is in group i modulo G."""
    centre = kind is not UncentredAlignment
    if centre:
        xs, ys = [without_mean(x) for x in xs], [without_mean(y) for y in ys]
    n = len(xs[0])
    dealt = [torch.arange(group, n, groups, device=xs[0].device) for group in range(groups)]
    by_columns = columns_are_cheaper(xs, ys)
    left = (_by_columns if by_columns else _by_rows)(xs, ys, dealt, centre)
    if kind is DebiasedAlignment or (centre and not by_columns):
        x, y = _Side(xs, dealt), _Side(ys, dealt)
        for group, out in enumerate(dealt):
            kept = torch.ones(n, dtype=torch.bool, device=out.device).index_fill(0, out, False)
            if not by_columns:
                left[group] = _centred(left[group], x, y, group, kept)
            if kind is DebiasedAlignment:
                left[group] = _debiased(left[group], x.diagonals(group, kept), y.diagonals(group, kept))
    xx, yy, xy = (torch.stack(parts) for parts in zip(*left, strict=True))
    return kind(xx, yy, xy)


def _by_rows(xs: Sequence[Tensor], ys: Sequence[Tensor], dealt: Sequence[Tensor], centre: bool) -> list[Three]:
    """Of the Gram matrices as they are, the rows of a group at a time."""
    strips, squares = [], []
    for out in dealt:
        k, l = (torch.stack([(rows[out] @ rows.T).double() for rows in side]) for side in (xs, ys))
        strips.append(products(k.flatten(1), l.flatten(1)))
        squares.append(products(k[:, :, out].flatten(1), l[:, :, out].flatten(1)))
    whole = [torch.stack(parts).sum(0) for parts in zip(*strips, strict=True)]
    left: list[Three] = []
    for strip, square in zip(strips, squares, strict=True):
        # A row that is left out takes its column with it, and the two cross in the square.
        xx, yy, xy = (w - 2 * s + q for w, s, q in zip(whole, strip, square, strict=True))
        left.append((xx, yy, xy))
    return left


def _by_columns(xs: Sequence[Tensor], ys: Sequence[Tensor], dealt: Sequence[Tensor], centre: bool) -> list[Three]:
    """Through covariances about the mean of what is kept, all sites side by side."""
    xs, ys = [x.double() for x in xs], [y.double() for y in ys]
    x, y = torch.cat(xs, dim=1), torch.cat(ys, dim=1)
    of_x, of_y = owners(xs), owners(ys)
    whole, own = x.T @ y, [[self_product(rows) for rows in side] for side in (xs, ys)]
    left: list[Three] = []
    for out in dealt:
        squares = _less(whole, x[out], y[out], len(x), centre).square()
        by_x = squares.new_zeros(len(xs), squares.shape[1]).index_add(0, of_x, squares)
        xx, yy = (
            torch.stack([_less(s, r[out], r[out], len(x), centre).square().sum() for s, r in zip(*side, strict=True)])
            for side in zip(own, (xs, ys), strict=True)
        )
        left.append((xx[:, None], yy[None, :], by_x.new_zeros(len(xs), len(ys)).index_add(1, of_y, by_x)))
    return left


def _less(whole: Tensor, x: Tensor, y: Tensor, n: int, centre: bool) -> Tensor:
    """Σ x yᵀ without some of its n rows."""
    found = whole - x.T @ y
    return found - torch.outer(x.sum(0), y.sum(0)) / (n - len(x)) if centre else found


class _Side:
    """What moving the mean of one side takes: S sites, n centred rows, G groups."""

    def __init__(self, sites: Sequence[Tensor], dealt: Sequence[Tensor]) -> None:
        gone = [torch.stack([rows[out].sum(0, dtype=torch.float64) for out in dealt]) for rows in sites]
        self.sums = torch.stack([-rows.double() @ s.T for rows, s in zip(sites, gone, strict=True)])  # (S, n, G)
        self.totals = torch.stack([s.square().sum(1) for s in gone])  # (S, G)
        self.lengths = torch.stack([rows.double().square().sum(1) for rows in sites])  # (S, n)

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
