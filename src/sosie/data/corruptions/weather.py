"""Light and weather: brightness, fog, spatter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .define import Draws, define, unit
from .sampling import places, read_at, smoothed

LARGEST, OCTAVES = 64, 7  # of fog: clouds of that many pixels of a 28 × 28 image, of half as many …
MUD = 63 / 255


@define(0.1, 0.3, 0.5, 0.6, 0.7)
def brightness(x: Tensor, more: float, draws: Draws) -> Tensor:
    """The largest channel of a pixel is raised, hue and saturation staying as they are."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(max=1)
    return torch.where(value > 0, x * raised / value, raised)  # black has no hue and becomes grey


@define(1.0, 2.0, 3.0, 4.0, 5.0)
def fog(x: Tensor, density: float, draws: Draws) -> Tensor:
    """Clouds of every size are added, and all is scaled so that the brightest stays in range."""
    brightest = x.amax((1, 2, 3), keepdim=True)
    total = brightest + density
    return (x + density * _clouds(x, draws)) * brightest / total


def _clouds(x: Tensor, draws: Draws) -> Tensor:
    """Numbers in [0, 1]: noise at each size, whose amplitude halves with its size, spread so that both ends occur."""
    rows, columns = places(x)
    found = torch.full((len(x), 1, *x.shape[-2:]), 0.5, dtype=x.dtype, device=x.device)
    for k in range(OCTAVES):
        size = LARGEST * unit(x) / 2**k
        height, width = (math.ceil(extent / size) + 2 for extent in x.shape[-2:])
        start = draws.part(2 * k).uniforms(2, 1, 1)  # of the picture among the knots
        knots = draws.part(2 * k + 1).uniforms(1, height, width).to(x.dtype) - 0.5
        found = found + read_at(knots, rows / size + start[:, 0], columns / size + start[:, 1], "border") / 2 ** (k + 1)
    return (found * (math.pi / 2)).sin() ** 2


@define(0.6, 0.3, 0.0, -0.2, -0.4)
def spatter(x: Tensor, threshold: float, draws: Draws) -> Tensor:
    """Spots of grey mud lie where smooth noise exceeds a threshold, in its standard deviations."""
    layer = smoothed(draws.normals(1, *x.shape[-2:]).to(x.dtype), unit(x))
    level = threshold / (2 * math.sqrt(math.pi) * unit(x))  # white noise, smoothed over s pixels: 1 / (2 √π s)
    mud = smoothed((layer > level).to(x.dtype), 1.5 * unit(x))
    mud = torch.where(mud < 0.8, torch.zeros_like(mud), mud)  # the rims are too thin to see
    return x * (1 - mud) + MUD * mud
