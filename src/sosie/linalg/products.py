"""Products of columns, and sums of squares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

FLOAT32_PRODUCTS = 2.0**-40, 2.0**50  # where the largest number lies for float32 to hold sums of products of two
FLOAT64_PRODUCTS = 1e-36, 1e36  # and float64 those of eight, which the spread of chance levels takes
FEW = 16  # one row in so many is looked at first

_BY_TORCH: ContextVar[bool] = ContextVar("sosie_all_by_torch", default=False)


def product(x: Tensor, y: Tensor) -> Tensor:
    """XY, in the finer of the two precisions; on a CPU by way of NumPy.

    NumPy computes XᵀX at half the price, as torch does not, and its linear algebra stands a busy machine far better;
    products that follow each other are left to one library, since the threads of both would fight over the cores.
    """
    dtype = torch.promote_types(x.dtype, y.dtype)
    left, right = x.to(dtype), y.to(dtype)
    if not for_numpy(left) or not for_numpy(right):
        return left @ right
    with np.errstate(all="ignore"):  # what is not finite is noticed elsewhere, and named
        return torch.from_numpy(left.numpy() @ right.numpy())


def cross_product(x: Tensor, y: Tensor) -> Tensor:
    """XᵀY."""
    return product(x.T, y)


def self_product(rows: Tensor) -> Tensor:
    """XᵀX; on a CPU at half the price."""
    return cross_product(rows, rows)


def for_numpy(matrix: Tensor) -> bool:
    """Whether NumPy and SciPy may compute with it: on a CPU, and no gradient is wanted."""
    plain = matrix.device.type == "cpu" and not matrix.requires_grad
    return plain and matrix.dtype in (torch.float32, torch.float64) and not _BY_TORCH.get()


@contextmanager
def all_by_torch() -> Iterator[None]:
    """Nothing by NumPy or SciPy inside the block: what counts torch's operations sees all of them."""
    token = _BY_TORCH.set(True)
    try:
        yield
    finally:
        _BY_TORCH.reset(token)


def with_room(rows: Tensor, label: str) -> Tensor:
    """Rows whose products neither overflow nor vanish: in float64 where float32 does not hold them."""
    return rows.double() if lacks_room(rows, label) else rows


def lacks_room(rows: Tensor, label: str, largest: float | None = None) -> bool:
    """Whether products of such rows leave float32; an error where they leave float64. NaN is noticed elsewhere.

    `largest`: the largest number in some of the rows, where that is known; 0 tells nothing.
    """
    largest = largest or _largest(rows[::FEW]) or _largest(rows)
    low, high = FLOAT64_PRODUCTS
    if math.isfinite(largest) and largest and not low <= largest <= high:
        raise ValueError(
            f"the largest number in {label} is {largest:.0e}: products of such leave what float64 holds; multiply "
            f"{label} by a power of 2 that brings it near 1"
        )
    low, high = FLOAT32_PRODUCTS
    return rows.dtype != torch.float64 and bool(largest) and not low <= largest <= high


def near_one(rows: Tensor) -> Tensor:
    """Rows times the power of 2 that brings the largest number near 1: exact, and none where their products fit."""
    largest = _largest(rows)
    low, high = FLOAT64_PRODUCTS if rows.dtype == torch.float64 else FLOAT32_PRODUCTS
    if low <= largest <= high or not largest or not math.isfinite(largest):
        return rows
    most = 1000 if rows.dtype == torch.float64 else 126  # the largest power that this precision holds
    return rows * 2.0 ** max(-most, min(most, -math.frexp(largest)[1]))


def _largest(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows.detach(), torch.inf)) if rows.numel() else 0.0


def column_squares(rows: Tensor) -> Tensor:
    """Σ x² of each column."""
    return _squares(rows, "ij,ij->j") if for_numpy(rows) else rows.square().sum(0)


def row_squares(rows: Tensor) -> Tensor:
    """Σ x² of each row."""
    return _squares(rows, "ij,ij->i") if for_numpy(rows) else rows.square().sum(1)


def total_squares(rows: Tensor) -> Tensor:
    """Σ x² of all entries, in float64; not finite where an entry is not, or its square overflows."""
    if not for_numpy(rows) or rows.dtype != torch.float64:
        return rows.double().square().sum()
    flat = rows.numpy().ravel(order="K")  # as they lie in memory, so that a transpose is not copied
    with np.errstate(all="ignore"):
        return torch.tensor(np.einsum("i,i->", flat, flat), dtype=torch.float64)


def _squares(rows: Tensor, which: str) -> Tensor:
    """In one go, with nothing written to memory; and no torch threads, which would wait for those of a product."""
    array = rows.numpy()
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.einsum(which, array, array, dtype=np.float64)).to(rows.dtype)
