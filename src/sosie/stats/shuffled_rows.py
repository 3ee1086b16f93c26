"""Inner products of Gram matrices of all rows when the rows of one side are shuffled, many draws over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..linalg import diagonal_part
from .from_rows import alignment, columns_are_cheaper, without_mean
from .left_out import owners
from .shuffle import Shuffle
from .views import Alignment, DebiasedAlignment, UncentredAlignment


def shuffled_alignment(
    xs: Sequence[Tensor], ys: Sequence[Tensor], kind: type[Alignment], shuffles: Iterable[Shuffle]
) -> Alignment:
    """xx (A, 1) and yy (1, B) as they are, xy (D, A, B): one draw each."""
    whole = alignment(xs, ys, kind)
    if kind is not UncentredAlignment:
        xs, ys = [without_mean(x) for x in xs], [without_mean(y) for y in ys]
    by = _ByColumns if columns_are_cheaper(xs, ys) else _ByRows
    products = by(xs, ys)
    k, l = (torch.stack([rows.square().sum(1).double() for rows in side], dim=1) for side in (xs, ys))  # (n, sites)
    n, draws = len(k), []
    for shuffle in shuffles:
        xy = products.shuffled(shuffle)
        if kind is DebiasedAlignment:
            xy = xy - diagonal_part(k.T @ l[shuffle.order], k.sum(0)[:, None], l.sum(0)[None, :], n)
        draws.append(xy)
    return kind(whole.xx, whole.yy, torch.stack(draws))


class _ByColumns:
    """‖XᵀPY‖² of every pair of sites out of one product of all columns."""

    def __init__(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        self.x, self.y = (torch.cat([rows.double() for rows in side], dim=1) for side in (xs, ys))
        self.of_x, self.of_y = (owners(side) for side in (xs, ys))
        self.shape = len(xs), len(ys)

    def shuffled(self, shuffle: Shuffle) -> Tensor:
        squares = (self.x.T @ self.y[shuffle.order]).square()
        by_x = squares.new_zeros(self.shape[0], squares.shape[1]).index_add(0, self.of_x, squares)
        return by_x.new_zeros(self.shape).index_add(1, self.of_y, by_x)


class _ByRows:
    """⟨K, P L Pᵀ⟩ of every pair of sites out of one product of all Gram matrices."""

    def __init__(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        self.k = torch.stack([(x @ x.T).double().flatten() for x in xs])
        self.l = [(y @ y.T).double() for y in ys]

    def shuffled(self, shuffle: Shuffle) -> Tensor:
        return torch.stack([self.k @ shuffle(gram, "square").flatten() for gram in self.l], dim=1)
