"""Products of columns, and sums of squares."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CACHED_ROWS = 128


def cross_product(x: Tensor, y: Tensor) -> Tensor:
    """XᵀY, in the finer of the two precisions; on a CPU by way of NumPy.

    NumPy computes XᵀX at half the price, as torch does not, and its linear algebra stands a busy machine far better;
    products that follow each other are left to one library, since the threads of both would fight over the cores.
    """
    dtype = torch.promote_types(x.dtype, y.dtype)
    left, right = x.to(dtype), y.to(dtype)
    if not _for_numpy(left) or not _for_numpy(right):
        return left.T @ right
    with np.errstate(all="ignore"):  # what is not finite is noticed elsewhere, and named
        return torch.from_numpy(left.numpy().T @ right.numpy())


def self_product(rows: Tensor) -> Tensor:
    """XᵀX; on a CPU at half the price."""
    return cross_product(rows, rows)


def symmetric_eigenvalues(matrix: Tensor) -> Tensor:
    """Ascending, of a symmetric matrix; no gradient is needed on a CPU."""
    if not _for_numpy(matrix):
        return torch.linalg.eigvalsh(matrix)
    return torch.from_numpy(np.linalg.eigvalsh(matrix.numpy()))


def _for_numpy(matrix: Tensor) -> bool:
    return matrix.device.type == "cpu" and not matrix.requires_grad and matrix.dtype in (torch.float32, torch.float64)


def column_squares(rows: Tensor) -> Tensor:
    """Σ x² of each column; a few rows at a time, which stay in a CPU's cache."""
    if rows.device.type != "cpu" or rows.requires_grad:
        return rows.square().sum(0)
    return torch.stack([part.square().sum(0) for part in rows.split(CACHED_ROWS)]).sum(0)


def row_squares(rows: Tensor) -> Tensor:
    """Σ x² of each row; a few at a time, which stay in a CPU's cache."""
    if rows.device.type != "cpu" or rows.requires_grad:
        return rows.square().sum(1)
    return torch.cat([part.square().sum(1) for part in rows.split(CACHED_ROWS)])
