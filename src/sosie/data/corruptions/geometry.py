"""The picture moved: sheared, scaled, rotated or shifted about its centre, black coming in from outside."""

from __future__ import annotations

import torch
from torch import Tensor

from .define import Draws, define, unit
from .sampling import places, read_at


def _mapped(x: Tensor, matrix: list[list[Tensor | float]], shift: tuple[Tensor | float, Tensor | float]) -> Tensor:
    """Each pixel from where matrix and shift lead, in (row, column) from the centre."""
    middle = [(size - 1) / 2 for size in x.shape[-2:]]
    rows, columns = (place - centre for place, centre in zip(places(x), middle, strict=True))
    down, across = (a * rows + b * columns + c + m for (a, b), c, m in zip(matrix, shift, middle, strict=True))
    return read_at(x, torch.as_tensor(down).expand(len(x), -1, -1), torch.as_tensor(across).expand(len(x), -1, -1))


@define(0.2, 0.3, 0.4, 0.6, 0.8)
def shear(x: Tensor, slope: float, draws: Draws) -> Tensor:
    """Upright lines lean to the left or to the right."""
    return _mapped(x, [[1.0, 0.0], [slope * draws.signs(1, 1), 1.0]], (0.0, 0.0))


@define(0.9, 0.8, 0.7, 0.6, 0.5)
def scale(x: Tensor, factor: float, draws: Draws) -> Tensor:
    """Made smaller."""
    return _mapped(x, [[1 / factor, 0.0], [0.0, 1 / factor]], (0.0, 0.0))


@define(0.2, 0.3, 0.4, 0.6, 0.8)
def rotate(x: Tensor, angle: float, draws: Draws) -> Tensor:
    """Turned to the left or to the right, by an angle in radians."""
    turned = angle * draws.signs(1, 1)
    return _mapped(x, [[turned.cos(), turned.sin()], [-turned.sin(), turned.cos()]], (0.0, 0.0))


@define(1.0, 2.0, 3.0, 4.0, 5.0)
def translate(x: Tensor, distance: float, draws: Draws) -> Tensor:
    """Shifted up or down, and to the left or to the right."""
    signs = distance * unit(x) * draws.signs(2, 1, 1)
    return _mapped(x, [[1.0, 0.0], [0.0, 1.0]], (signs[:, 0], signs[:, 1]))
