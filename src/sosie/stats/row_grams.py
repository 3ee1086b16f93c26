"""Gram matrices of rows in hand: what one view of them takes is kept for the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linalg import once
from .from_rows import columns_are_cheaper, from_products, inner_products, without_mean
from .left_out import GroupedProducts, left_out_alignment
from .views import Alignment, DebiasedAlignment, UncentredAlignment

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
        """The largest share that one row has in ‖K‖² of each site, where that is at hand."""
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
