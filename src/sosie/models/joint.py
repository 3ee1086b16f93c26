"""The layer between two networks: an affine map of channels, after a change of shape where theirs differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Resize = Literal["interpolate", "pool"]
RESIZES: tuple[Resize, ...] = ("interpolate", "pool")


@dataclass(frozen=True)
class Form:
    """What an activation of one input is: a vector, tokens with features, or a map of channels."""

    channels: int
    space: tuple[int, ...] = ()  # height and width of a map, the number of tokens; empty: a vector
    tokens: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], channels_last: bool | None) -> Form:
        """From the shape of one input's activation, and whether features come last; None: it is not known."""
        if 0 in shape:
            raise ValueError(f"an activation of shape {shape} an input has nothing in it that could be stitched")
        if not shape:
            raise ValueError("an activation of one number an input cannot be stitched")
        if len(shape) == 1:
            return cls(shape[0])
        if channels_last is None:
            raise ValueError(
                f"an activation of shape {shape} an input cannot be stitched: nothing tells which dimension holds its "
                "features; choose another site"
            )
        if channels_last:
            return cls(shape[-1], shape[:-1], tokens=True)
        return cls(shape[0], shape[1:])

    def __str__(self) -> str:
        if not self.space:
            return f"a vector of {self.channels}"
        size = " × ".join(map(str, self.space))
        return f"{size} tokens of {self.channels}" if self.tokens else f"a map of {self.channels} channels, {size}"


class Joint(nn.Module):
    """Turns an activation of one network into one of another: shape first, then channels.

    Maps of another size are interpolated (bilinear) or pooled (adaptive mean), as `resize` says. Between maps and
    tokens a grid of tokens is read row by row; where one side has a token more than its grid, it is a class token:
    on the way to a map it is dropped, on the way to tokens it is made, as the mean of the others. A map or tokens
    become a vector by their mean.
    """

    def __init__(self, source: Form, target: Form, resize: Resize = "interpolate", *, bias: bool = True) -> None:
        super().__init__()
        if resize not in RESIZES:
            raise ValueError(f"no way to resize is called {resize!r}; there are {', '.join(RESIZES)}")
        _check(source, target)
        self.source, self.target, self.resize = source, target, resize
        self.weight = nn.Parameter(torch.zeros(target.channels, source.channels))
        self.bias = nn.Parameter(torch.zeros(target.channels)) if bias else None

    @property
    def reshapes(self) -> bool:
        """Whether the sites differ in more than their channels."""
        return self.source.space != self.target.space or self.source.tokens != self.target.tokens

    def forward(self, activation: Tensor) -> Tensor:
        shaped = self.shaped(activation)
        if not self.target.space or self.target.tokens:
            return F.linear(shaped, self.weight, self.bias)
        # Laid out as a network's own layer would: some go on with `x.view(…)`.
        mapped = torch.einsum("oc,nc...->no...", self.weight, shaped).contiguous()
        return mapped if self.bias is None else mapped + self.bias.view(1, -1, *[1] * len(self.target.space))

    def shaped(self, activation: Tensor) -> Tensor:
        """The activation in the target's shape, with the source's channels still."""
        source, target = self.source, self.target
        if not self.reshapes:
            return activation
        if not target.space:
            return activation.mean(
                tuple(range(1, activation.ndim - 1)) if source.tokens else (2, 3)[: activation.ndim - 2]
            )
        grid, extra = _grid(source)
        if source.tokens:
            activation = activation[:, extra:].transpose(1, 2).reshape(len(activation), -1, *grid)
        wanted, class_token = _grid(target)
        activation = self._resized(activation, wanted)
        if not target.tokens:
            return activation
        tokens = activation.flatten(2).transpose(1, 2)
        return torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1) if class_token else tokens

    def _resized(self, maps: Tensor, size: tuple[int, ...]) -> Tensor:
        if tuple(maps.shape[2:]) == size:
            return maps
        if self.resize == "pool":
            return F.adaptive_avg_pool2d(maps, (size[0], size[1]))
        return F.interpolate(maps, size=size, mode="bilinear", align_corners=False)

    def extra_repr(self) -> str:
        return f"{self.source} → {self.target}, {self.resize}"


def _grid(form: Form) -> tuple[tuple[int, ...], int]:
    """Height and width, and how many tokens come before the grid."""
    if not form.tokens:
        return form.space, 0
    count = form.space[0]
    for extra in (0, 1):
        side = math.isqrt(count - extra)
        if side * side == count - extra:
            return (side, side), extra
    raise ValueError(f"{form}: {count} tokens are no square grid, with or without a class token")


def _check(source: Form, target: Form) -> None:
    if source.space == target.space and source.tokens == target.tokens:
        return
    if not source.space:
        raise ValueError(f"{source} cannot become {target}: there is no telling where in it what belongs")
    for form in (source, target):
        if form.space and len(form.space) != (1 if form.tokens else 2) and target.space:
            raise ValueError(f"{source} cannot become {target}: only maps of two dimensions and tokens are resized")
    if target.space:
        _grid(source)
        _grid(target)
