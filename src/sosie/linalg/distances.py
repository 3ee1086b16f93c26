"""Euclidean distances between all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .centring import centred
from .products import for_numpy, row_squares, self_product

NEAR = 1e-2  # of ‖x‖² + ‖y‖², below which ‖x − y‖² is taken from the difference: at most two digits are lost above
MANY = 0.1  # share of pairs that are near, from which on all are taken from their differences
AT_A_TIME = 2**18  # entries of such differences


def distances(rows: Tensor) -> Tensor:
    """(n, n), with all digits also where rows are close."""
    return squared_distances(rows).sqrt_()


def squared_distances(rows: Tensor) -> Tensor:
    """(n, n), by way of inner products; from differences between rows that are close, where those would lose digits."""
    x = centred(rows)  # distances do not change, but their rounding does
    lengths = row_squares(x)
    found = self_product(x.T).mul_(-2).add_(lengths[:, None]).add_(lengths)  # in place: these are large
    found.fill_diagonal_(torch.inf)
    if bool(found.amin() < 2 * NEAR * lengths.amax()):  # rules it out for most
        _take_differences(found, rows, lengths)
    return found.fill_diagonal_(0)


def _take_differences(found: Tensor, rows: Tensor, lengths: Tensor) -> None:
    """Where rows are close, as rows come: their mean may be far from all of them."""
    i, j = (found < NEAR * (lengths[:, None] + lengths)).triu_(1).nonzero(as_tuple=True)
    if len(i) > MANY * len(rows) ** 2 / 2:
        i, j = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
        found[i, j] = found[j, i] = torch.pdist(rows).square_()
        return
    step = max(AT_A_TIME // rows.shape[1], 1)
    for a, b in zip(i.split(step), j.split(step), strict=True):
        found[a, b] = found[b, a] = row_squares(rows[a] - rows[b])


def upper_triangle(square: Tensor) -> Tensor:
    """(n (n − 1) / 2,): what lies above the diagonal of (n, n), row by row."""
    if for_numpy(square):
        from scipy.spatial.distance import squareform

        return torch.from_numpy(squareform(square.numpy(), checks=False))
    i, j = torch.triu_indices(len(square), len(square), 1, device=square.device)
    return square[i, j]
