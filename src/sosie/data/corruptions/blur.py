"""Blur: seen through glass, or while moving."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .define import Draws, define, unit
from .sampling import places, read_at, smoothed


@define((0.4, 1, 1), (0.55, 1, 2), (0.7, 1, 2), (0.9, 2, 2), (1.2, 3, 2))
def glass_blur(x: Tensor, strength: tuple[float, int, int], draws: Draws) -> Tensor:
    """Smoothed, then every other pixel is taken from a place nearby, more than once, then smoothed again."""
    sigma, reach, rounds = strength[0] * unit(x), max(1, round(strength[1] * unit(x))), strength[2]
    n, _, height, width = x.shape
    rows, columns = (place.long() for place in places(x))
    each = torch.arange(n, device=x.device)[:, None, None]
    x = smoothed(x, sigma)
    for k in range(rounds):
        u = draws.part(k).uniforms(3, height, width)
        moved = torch.where(u[:, :1] < 0.5, ((2 * reach + 1) * u[:, 1:]).floor().long() - reach, 0)
        down = (rows + moved[:, 0]).clamp(0, height - 1)
        across = (columns + moved[:, 1]).clamp(0, width - 1)
        x = x[each, :, down, across].movedim(-1, 1)
    return smoothed(x, sigma)


@define(1.5, 2.2, 3.0, 4.5, 6.0)
def motion_blur(x: Tensor, length: float, draws: Draws) -> Tensor:
    """Drawn out to one side, at up to 45° from the horizontal, fading as half a Gaussian."""
    length = length * unit(x)
    angle = (draws.uniforms(1, 1) - 0.5) * (math.pi / 2)
    rows, columns = places(x)
    total, weights = torch.zeros_like(x), 0.0
    for distance in range(math.ceil(3 * length) + 1):
        weight = math.exp(-((distance / length) ** 2) / 2)
        moved = read_at(x, rows + distance * angle.sin(), columns + distance * angle.cos(), beyond="border")
        total, weights = total + weight * moved, weights + weight
    return total / weights
