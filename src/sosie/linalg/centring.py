"""Centring of rows and of Gram matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def centred(rows: Tensor) -> Tensor:
    """Rows (…, n, p) less their mean."""
    return rows - rows.mean(dim=-2, keepdim=True)


def double_centred(gram: Tensor) -> Tensor:
    """HKH for Gram matrices (…, n, n): what the rows' centring would have given."""
    row = gram.mean(dim=-1, keepdim=True)
    found = gram - (row - row.mean(dim=-2, keepdim=True))
    found -= row.transpose(-1, -2)  # in place: these are large
    return found


def centred_diagonal(gram: Tensor) -> Tensor:
    """The diagonal (…, n) of HKH, without making the rest."""
    row = gram.mean(dim=-1)
    return gram.diagonal(dim1=-2, dim2=-1) - 2 * row + row.mean(dim=-1, keepdim=True)


def u_centred(gram: Tensor) -> Tensor:
    """Székely and Rizzo's U-centring of symmetric Gram matrices (…, n, n); the diagonal becomes zero.

    ⟨u_centred(K), u_centred(L)⟩ / (n (n − 3)) is the unbiased estimate of HSIC; needs n ≥ 4.
    """
    n = gram.shape[-1]
    if n < 4:
        raise ValueError(f"U-centring needs at least 4 rows, got {n}")
    hollow = without_diagonal(gram)
    row = hollow.sum(dim=-1, keepdim=True) / (n - 2)
    total = row.sum(dim=-2, keepdim=True) / (n - 1)
    hollow -= row - total  # in place: for many sites together these are large
    hollow -= row.transpose(-1, -2)
    hollow.diagonal(dim1=-2, dim2=-1).zero_()
    return hollow


def without_diagonal(gram: Tensor) -> Tensor:
    n = gram.shape[-1]
    return gram.masked_fill(torch.eye(n, dtype=torch.bool, device=gram.device), 0.0)
