"""Tensors whose first axis are neurons or atoms: pairs of them, and what a measure says when neurons are changed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sosie.measures import Measure

Value = Callable[[Measure, Tensor, Tensor], Tensor]


def pair_of(shape: tuple[int, ...], seed: int = 0, common: float = 1.0) -> tuple[Tensor, Tensor]:
    """Two that have something in common."""
    random = torch.Generator().manual_seed(seed)
    shared = torch.randn(shape, generator=random, dtype=torch.float64)
    x, y = (common * shared + 0.7 * torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(2))
    return x, y


def transformed(tensor: Tensor, how: str) -> Tensor:
    """Changed as TRANSFORMATIONS says of neurons: mixed with each other, or a number added to all of each."""
    random = torch.Generator().manual_seed(5)
    count = len(tensor)
    flat = tensor.flatten(1)
    square = torch.randn(count, count, generator=random, dtype=tensor.dtype)
    changed = {
        "permutation": lambda: flat.flip(0),
        "rotation": lambda: torch.linalg.qr(square).Q @ flat,
        "stretch": lambda: torch.linspace(0.3, 2, count, dtype=tensor.dtype)[:, None] * flat,
        "linear": lambda: (square + 2 * torch.eye(count, dtype=tensor.dtype)) @ flat,
        "scale": lambda: 3.7 * flat,
        "shift": lambda: flat + 2 * torch.randn(count, 1, generator=random, dtype=tensor.dtype),
    }[how]()
    return changed.view(tensor.shape)


def check_invariance(measure: Measure, x: Tensor, y: Tensor, how: str, value_of: Value) -> None:
    """It moves under a change of either side if and only if it does not declare that it does not."""
    before = value_of(measure, x, y)
    after = [value_of(measure, transformed(x, how), y), value_of(measure, x, transformed(y, how))]
    moved = max(float((value - before).abs()) for value in after)
    if how in measure.invariant:
        assert moved < 1e-9, f"{measure.name} under {how} moved by {moved}"
    else:
        assert moved > 1e-4, f"{measure.name} under {how} did not move, but does not declare that"
