"""What a difference looks like, in words: scaled, shifted, NaN, axes or features in another order."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ..stats import Entries
from .pairing import Pair
from .replay import numbers

EXPLAINED = 0.01  # share of the squared error that may be left for a scale or a shift to explain it
LAYOUT = 1e-3  # relative error up to which axes in another order give the same numbers
MOST_FEATURES = 4096


def notes_of(entries: Entries) -> list[str]:
    """What the sums over entries show."""
    aa, bb, ab, dd, a, b = (float(each.sum()) for each in (
        entries.aa, entries.bb, entries.ab, entries.dd, entries.a, entries.b
    ))  # fmt: skip
    notes = []
    if lone := int(entries.lone):
        notes.append(f"{lone:,} entries are NaN or infinite in one model alone")
    if alike := int(entries.alike):
        notes.append(f"{alike:,} entries are NaN or infinite in both models alike, and left out")
    if aa > 0 and dd > 0:
        slope = ab / aa
        if bb - ab * slope <= EXPLAINED * dd:
            notes.append("zero in B" if bb == 0 else f"scaled by {slope:.4g}")
        elif dd - (b - a) ** 2 / entries.entries <= EXPLAINED * dd:
            notes.append(f"shifted by {(b - a) / entries.entries:.4g}")
    return notes


def axes_of(a: Tensor, b: Tensor) -> tuple[int, ...] | None:
    """The order of B's axes in which its numbers are A's; None if they are so as they are, or in no order."""
    a, b = numbers(a), numbers(b)
    if a.ndim != b.ndim or not 3 <= a.ndim <= 5 or sorted(a.shape) != sorted(b.shape) or _near(a, b):
        return None
    for axes in itertools.permutations(range(a.ndim)):
        if axes != tuple(range(a.ndim)) and b.permute(axes).shape == a.shape and _near(a, b.permute(axes)):
            return axes
    return None


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    size = float(torch.linalg.vector_norm(a, dtype=torch.float64))
    return math.isfinite(size) and float(torch.linalg.vector_norm(a - b, dtype=torch.float64)) <= LAYOUT * size


def with_axes(pair: Pair, a: Tensor, b: Tensor) -> Pair:
    """The pair with the order of B's axes, if it is another one."""
    axes = axes_of(a, b)
    if axes is None:
        return pair
    return Pair(pair.a, pair.b, f"{pair.how}, axes {list(axes)} of B", axes)


def same_features(a: Tensor, b: Tensor) -> bool:
    """Whether B has A's features in another order, along the last axis or that of channels."""
    a, b = numbers(a), numbers(b)
    if a.shape != b.shape:
        return False
    for axis in {1, a.ndim - 1} - {0}:
        x, y = (each.movedim(axis, 0).flatten(1).double() for each in (a, b))
        if not 2 <= len(x) <= MOST_FEATURES or x.shape[1] < 2:
            continue
        # Each feature by a few fixed sums of its numbers, in which two features are hardly ever alike.
        weights = torch.randn(x.shape[1], 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
        order_x, order_y = ((each @ weights)[:, 0].argsort() for each in (x, y))
        if not torch.equal(order_x, order_y) and _near(x[order_x], y[order_y]):
            return True
    return False
