"""The precision of our own float32 matrix products on a GPU, borrowed for as long as they take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .plan import Kind

PRECISIONS = ("tf32", "float32", "float64")


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")


@contextmanager
def products(kind: Kind | None = None, precision: str | None = None) -> Iterator[None]:
    """Full float32 products on a GPU, but TF32 for Gram matrices unless more is asked for; then the old setting.

    Rounding the activations to TF32 moves a CKA by less than 1e-5, since rows are centred first, and full
    float32 costs more. Moments and sampled rows get float32 always: their parts must match to the last digit.
    """
    fast = kind == "grams" and precision in (None, "tf32") and torch.cuda.is_initialized()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if fast else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
