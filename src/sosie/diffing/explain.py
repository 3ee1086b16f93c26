"""What a difference looks like, in words: scaled, shifted, NaN, axes or features in another order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..stats import Entries, real_numbers
from .pairing import SAME_NUMBERS, Pair

EXPLAINED = 0.01  # share of the squared error that may be left for a scale or a shift to explain it
MOST_FEATURES = 4096


def notes_of(entries: Entries) -> list[str]:
    """What the sums over entries show."""
    aa, bb, ad, dd, d = (float(each.sum()) for each in (entries.aa, entries.bb, entries.ad, entries.dd, entries.d))
    notes = []
    if lone := int(entries.lone):
        notes.append(f"{lone:,} entries are NaN or infinite in one model alone")
    if alike := int(entries.alike):
        notes.append(f"{alike:,} entries are NaN or infinite in both models alike, and left out")
    if not math.isfinite(aa + bb + dd):
        notes.append("too large to be squared in float64")
    elif aa == 0 and dd > 0:
        notes.append("zero in A")
    elif dd > 0:
        if dd - ad * ad / aa <= EXPLAINED * dd:
            notes.append("zero in B" if bb == 0 else f"scaled by {1 - ad / aa:.4g}")
        elif dd - d * d / entries.entries <= EXPLAINED * dd:
            notes.append(f"shifted by {-d / entries.entries:.4g}")
    return notes


def numbers(tensor: Tensor) -> Tensor:
    """Real numbers in float32 or float64, dense."""
    tensor = real_numbers(tensor)
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.float64)


def axes_of(a: Tensor, b: Tensor) -> tuple[int, ...] | None:
    """The order of B's axes in which its numbers are near A's; None if they are so as they are, or in no order."""
    a, b = numbers(a), numbers(b).to(a.device)
    if a.ndim != b.ndim or not 3 <= a.ndim <= 5 or sorted(a.shape) != sorted(b.shape):
        return None
    if a.shape == b.shape and _error(a, b) < SAME_NUMBERS:
        return None
    orders = [axes for axes in itertools.permutations(range(a.ndim)) if b.permute(axes).shape == a.shape]
    errors = {axes: _error(a, b.permute(axes)) for axes in orders}
    best = min(orders, key=lambda axes: errors[axes])
    as_they_are = errors.get(tuple(range(a.ndim)), math.inf)
    return best if errors[best] < min(SAME_NUMBERS, as_they_are / 2) else None


def _error(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(a, dtype=torch.float64))
    error = float(torch.linalg.vector_norm(a - b, dtype=torch.float64)) / size if size else math.inf
    return error if math.isfinite(error) else math.inf


def near(a: Tensor, b: Tensor, least: float = SAME_NUMBERS) -> bool:
    """Whether two activations have the same numbers, allowing for an error."""
    return a.shape == b.shape and _error(numbers(a), numbers(b).to(a.device)) < least


def with_axes(pairs: Sequence[Pair], a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[Pair]:
    """The pairs, with the order of B's axes where it is another one: found at a site, or else at others like it."""
    found = {pair.a: axes_of(a[pair.a], b[pair.b]) for pair in pairs}
    usual = {len(axes): axes for axes in found.values() if axes is not None}
    result = []
    for pair in pairs:
        x = numbers(a[pair.a])
        y = numbers(b[pair.b]).to(x.device)
        axes = found[pair.a] or usual.get(x.ndim)
        as_it_is = x.shape == y.shape and _error(x, y) < SAME_NUMBERS
        if axes is not None and y.ndim == x.ndim and y.permute(axes).shape == x.shape and not as_it_is:
            pair = replace(pair, how=f"{pair.how}, B's axes in the order {list(axes)}", axes=axes)
        result.append(pair)
    return result


def same_features(a: Tensor, b: Tensor) -> bool:
    """Whether B has A's features in another order, along the last axis or that of channels."""
    a, b = numbers(a), numbers(b).to(a.device)
    if a.ndim < 2 or a.shape != b.shape or _error(a, b) < SAME_NUMBERS:
        return False
    for axis in {1, a.ndim - 1} - {0}:
        x, y = (each.movedim(axis, 0).flatten(1).double() for each in (a, b))
        if not 2 <= len(x) <= MOST_FEATURES or x.shape[1] < 2:
            continue
        # Each feature by a few fixed sums of its numbers, in which two features are hardly ever alike.
        weights = torch.randn(x.shape[1], 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
        order_x, order_y = ((each @ weights)[:, 0].argsort() for each in (x, y))
        if not torch.equal(order_x, order_y) and _error(x[order_x], y[order_y]) < SAME_NUMBERS:
            return True
    return False
