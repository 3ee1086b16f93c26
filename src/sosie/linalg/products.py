"""Products of a matrix with itself, at half the price."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CACHED_ROWS = 128


def self_product(rows: Tensor) -> Tensor:
    """XᵀX; on a CPU by way of NumPy, which computes one triangle and mirrors it, as torch does not."""
    if rows.device.type != "cpu" or rows.requires_grad or rows.dtype not in (torch.float32, torch.float64):
        return rows.T @ rows
    array = rows.detach().numpy()
    with np.errstate(all="ignore"):  # what is not finite is noticed elsewhere, and named
        return torch.from_numpy(array.T @ array)


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
