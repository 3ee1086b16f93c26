"""Whether two models hold the same tensors, and numbers in them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NAMED = 3  # names that an error spells out


def check_same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: tuple[str, str] = ("A", "B")) -> None:
    """Raise unless both have tensors of the same names and shapes; the error names what differs."""
    faults = []
    for label, ours, theirs in ((names[0], a, b), (names[1], b, a)):
        if only := [name for name in ours if name not in theirs]:
            faults.append(f"only {label} has {_some(only)}")
    shapes = [name for name in a if name in b and a[name].shape != b[name].shape]
    differ = [f"{n} is {tuple(a[n].shape)} in {names[0]} and {tuple(b[n].shape)} in {names[1]}" for n in shapes]
    faults += [_some(differ)] if differ else []
    if faults:
        raise ValueError(f"{names[0]} and {names[1]} are not of one architecture: {'; '.join(faults)}")


def check_finite(tensors: Mapping[str, Tensor], label: str) -> None:
    """Raise where a tensor holds NaN or infinity; the error names it."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (bad := int((~torch.isfinite(tensor)).sum())):
            raise ValueError(f"{name} of {label} has {bad} of {tensor.numel()} values that are NaN or infinite")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
