"""Edges only (Canny 1986)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .define import Draws, define, unit
from .sampling import places, read_at, smoothed

WEAK, STRONG = 0.1, 0.2  # of Sobel's differences of a picture in [0, 1]


@define(0.6, 0.8, 1.0, 1.4, 2.0)
def canny_edges(x: Tensor, sigma: float, draws: Draws) -> Tensor:
    """White edges on black: Canny's detector after smoothing, on the mean of the channels."""
    grey = smoothed(x.mean(1, keepdim=True), sigma * unit(x))
    down, across = _slopes(grey)
    steepness = (down**2 + across**2).sqrt()
    strongest = steepness.amax((1, 2, 3), keepdim=True)
    kept = (steepness >= WEAK) & _is_ridge(steepness, down, across) & (strongest > 0)
    kept[..., [0, -1], :] = False
    kept[..., :, [0, -1]] = False
    return _connected(kept, kept & (steepness >= STRONG)).to(x.dtype).expand_as(x)


def _slopes(grey: Tensor) -> tuple[Tensor, Tensor]:
    """Sobel's differences, down and across."""
    difference = torch.tensor([-1.0, 0.0, 1.0], dtype=grey.dtype, device=grey.device)
    weights = torch.tensor([1.0, 2.0, 1.0], dtype=grey.dtype, device=grey.device)
    kernels = torch.stack([torch.outer(difference, weights), torch.outer(weights, difference)])[:, None]
    both = functional.conv2d(functional.pad(grey, (1, 1, 1, 1), "replicate"), kernels)
    return both[:, :1], both[:, 1:]


def _is_ridge(steepness: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Is the slope at least as steep here as one pixel further uphill and downhill?"""
    rows, columns = places(steepness)
    scale = torch.maximum(down.abs(), across.abs())
    flat = scale == 0
    down, across = (torch.where(flat, scale, part / scale.masked_fill(flat, 1)) for part in (down, across))
    ridge = ~flat
    for side in (-1, 1):
        there = read_at(steepness, rows + side * down[:, 0], columns + side * across[:, 0])
        # Equal within rounding counts: else plateaus of two pixels would vanish on some devices and not on others.
        ridge &= steepness >= there - 1e-6
    return ridge


def _connected(kept: Tensor, strong: Tensor) -> Tensor:
    """Those that touch, through others that are kept, a strong one."""
    while True:
        grown = kept & (functional.max_pool2d(strong.float(), 3, stride=1, padding=1) > 0)
        if torch.equal(grown, strong):
            return strong
        strong = grown
