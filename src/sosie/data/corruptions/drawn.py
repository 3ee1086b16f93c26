"""What is drawn over the picture: stripes, a dotted line, a zigzag."""

from __future__ import annotations

import torch
from torch import Tensor

from .define import Draws, define, unit
from .sampling import places

THICKNESS = (1.2, 1.7, 2.3, 3.0, 4.0)


@define(1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8)
def stripe(x: Tensor, share: float, draws: Draws) -> Tensor:
    """The left and the right edge are shown as a negative."""
    width, x = round(share * x.shape[-1]), x.clone()
    x[..., :width] = 1 - x[..., :width]
    x[..., x.shape[-1] - width :] = 1 - x[..., x.shape[-1] - width :]
    return x


@define(*THICKNESS)
def dotted_line(x: Tensor, thickness: float, draws: Draws) -> Tensor:
    """A white line from the left to the right edge, at random heights, two pixels in four."""
    rows, columns = places(x)
    height, width = x.shape[-2:]
    ends = (draws.uniforms(2, 1, 1) * max(1, height - 1)).floor()
    line = ends[:, 0] + (ends[:, 1] - ends[:, 0]) * columns / max(1, width - 1)
    shown = (columns / (2 * unit(x))).floor() % 2 == 1
    return x + (_ink(rows - line, thickness * unit(x)) * shown)[:, None]


@define(*zip((1.0, 1.5, 2.0, 3.0, 4.0), THICKNESS, strict=True))
def zigzag(x: Tensor, strength: tuple[float, float], draws: Draws) -> Tensor:
    """A white zigzag across, slightly tilted."""
    swing, thickness, step = strength[0] * unit(x), strength[1] * unit(x), 2 * unit(x)
    rows, columns = places(x)
    height, width = x.shape[-2:]
    first, last = width / 14, width * 25 / 28
    u = draws.uniforms(2, 1, 1)
    start = (u[:, 0] * max(1, height - 1)).floor()
    angle = torch.atan2((u[:, 1] * 10).floor() * unit(x) - 5 * unit(x), torch.tensor(last - first))
    along = (columns - first) * angle.cos() + (rows - start) * angle.sin()
    beside = (rows - start) * angle.cos() - (columns - first) * angle.sin()
    # Up to the swing after one step, down to minus the swing after three, and so on.
    wave = swing * (1 - (((along / step - 3) % 4) - 2).abs())
    shown = (columns >= first) & (columns < last)
    return x + (_ink(beside - wave, thickness) * shown)[:, None]


def _ink(distance: Tensor, thickness: float) -> Tensor:
    """White in the middle, fading: 1 + log(1 − distance / thickness), black where that is negative."""
    inside = (1 - distance.abs() / thickness).clamp(min=0)
    return (1 + inside.log()).clamp(min=0)
