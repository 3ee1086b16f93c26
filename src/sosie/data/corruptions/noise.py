"""Noise of the sensor."""

from __future__ import annotations

import torch
from torch import Tensor

from .define import Draws, define


@define(12.0, 6.0, 3.0, 1.5, 0.75)
def shot_noise(x: Tensor, photons: float, draws: Draws) -> Tensor:
    """Few photons: counts with the Poisson distribution, that many on average where an image is brightest."""
    return draws.poisson(x * photons) / photons


@define(0.05, 0.1, 0.17, 0.27, 0.4)
def impulse_noise(x: Tensor, share: float, draws: Draws) -> Tensor:
    """A share of the values is set to black or to white, as often the one as the other."""
    u = draws.uniforms(*x.shape[1:])
    return torch.where(u < share / 2, torch.zeros_like(x), torch.where(u >= 1 - share / 2, torch.ones_like(x), x))
