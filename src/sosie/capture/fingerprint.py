"""One number an input, by which two passes over data can tell that they saw the same."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .arguments import without_labels
from .structure import rebuild, with_tensors


def input_numbers(batch: Any, count: int, device: torch.device | None = None) -> Tensor:
    """(count,) in float64, on a device: a fixed random combination of all that an input holds, its labels aside."""
    leaves: list[Any] = []
    rebuild(leaves.append, with_tensors(without_labels(batch)))
    found = torch.zeros(count, dtype=torch.float64, device=device)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count:
            rows = leaf.detach().reshape(count, -1)
            rows = rows.abs() if rows.is_complex() else rows
            # In float32 on whatever device the data are on; one number each moves.
            numbers = (rows.float() @ _weights(rows.shape[1], k, rows.device)).double()
            found += numbers.to(found.device, non_blocking=found.is_cuda)
        elif isinstance(leaf, (list, tuple)) and len(leaf) == count:
            numbers = torch.tensor([zlib.crc32(repr(item).encode()) / 2**32 for item in leaf], dtype=torch.float64)
            found += numbers.to(found.device, non_blocking=found.is_cuda)
    return torch.nan_to_num(found)  # one that is not a number would be like any other


@lru_cache(maxsize=16)
def _weights(width: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same for every device
    with torch.inference_mode(False):
        return torch.randn(width, generator=generator).to(device, non_blocking=True)
