"""The precision of our own float32 matrix products on a GPU, borrowed for as long as they take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("tf32", "float32", "float64")


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")


def allows_tf32(precision: str | None) -> bool:
    """Whether Gram matrices on a GPU may be made of TF32 products: unless more is asked for.

    Rounding the activations so moves a CKA by less than 1e-5, since rows are centred first.
    """
    return precision in (None, "tf32")


@contextmanager
def products(*, tf32: bool = False) -> Iterator[None]:
    """TF32 or full float32 products on a GPU; the user's setting is put back, and a CPU's is not touched.

    Moments and sampled rows get float32 always: their parts must match to the last digit.
    """
    if not torch.cuda.is_initialized():
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
