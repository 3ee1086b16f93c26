"""Products of a matrix with itself, at little more than half the price."""

from __future__ import annotations

import torch
from torch import Tensor

STRIP = 128  # columns made at a time


def self_product(rows: Tensor) -> Tensor:
    """XᵀX; on a CPU what symmetry repeats is copied, not computed."""
    width = rows.shape[1]
    if rows.is_cuda or rows.requires_grad or width <= STRIP:
        return rows.T @ rows
    found = torch.empty(width, width, dtype=rows.dtype)
    for start in range(0, width, STRIP):
        stop = min(start + STRIP, width)
        strip = rows[:, start:stop].T @ rows[:, start:]
        found[start:stop, start:] = strip
        found[stop:, start:stop] = strip[:, stop - start :].T
    return found
