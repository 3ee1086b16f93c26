"""Smoothing images and reading them between pixels."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


def smoothed(x: Tensor, sigma: float) -> Tensor:
    """Convolved with a Gaussian of that standard deviation in pixels; beyond the edge the edge goes on."""
    reach = math.ceil(4 * sigma)
    weights = torch.exp(-(torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device) ** 2) / (2 * sigma**2))
    weights = weights / weights.sum()
    flat = x.reshape(-1, 1, *x.shape[-2:])
    flat = functional.conv2d(functional.pad(flat, (0, 0, reach, reach), "replicate"), weights[None, None, :, None])
    flat = functional.conv2d(functional.pad(flat, (reach, reach, 0, 0), "replicate"), weights[None, None, None, :])
    return flat.reshape(x.shape)


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the column of each pixel, (1, height, 1) and (1, 1, width)."""
    rows, columns = (torch.arange(size, dtype=torch.float64, device=x.device) for size in x.shape[-2:])
    return rows[None, :, None], columns[None, None, :]


def read_at(x: Tensor, rows: Tensor, columns: Tensor, beyond: Literal["zeros", "border"] = "zeros") -> Tensor:
    """What lies at these places (n, height, width) of each image, linearly between pixels."""
    height, width = x.shape[-2:]
    rows, columns = torch.broadcast_tensors((2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1)
    grid = torch.stack([columns, rows], -1).to(x.dtype).expand(len(x), -1, -1, -1)
    return functional.grid_sample(x, grid, padding_mode=beyond, align_corners=False)
