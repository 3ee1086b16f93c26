"""The precision of our own float32 matrix products on a GPU."""

from __future__ import annotations

PRECISIONS = ("tf32", "float32", "float64")


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")


def allows_tf32(precision: str | None) -> bool:
    """Whether Gram matrices on a GPU may be made of TF32 products: unless more is asked for.

    Rounding the activations so moves a CKA by less than 1e-5, since rows are centred first.
    """
    return precision in (None, "tf32")
