"""Euclidean distances between all rows."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(rows: Tensor) -> Tensor:
    """(n, n), from differences: no digits are lost where rows are close, as they are by way of inner products."""
    n = len(rows)
    found = torch.pdist(rows)
    square = found.new_zeros(n, n)
    i, j = torch.triu_indices(n, n, 1, device=rows.device)
    square[i, j] = square[j, i] = found
    return square
