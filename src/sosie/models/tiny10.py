"""Tiny-10: eight un-padded convolutions for 32 × 32 images."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import initialise
from .registry import State, architecture, dimension

# output channels at width 1, kernel, stride
CONVOLUTIONS = (
    (16, 3, 1),
    (16, 3, 1),
    (32, 3, 2),
    (32, 3, 1),
    (32, 3, 1),
    (64, 3, 2),
    (64, 3, 1),
    (64, 1, 1),
)


class Tiny10(nn.Module):
    """conv1, bn1, … conv8, bn8 (a ReLU after each), mean over space, fc: 86,778 parameters at width 1."""

    def __init__(self, classes: int, channels: int, width: float) -> None:
        super().__init__()
        before = channels
        for i, (base, kernel, stride) in enumerate(CONVOLUTIONS, 1):
            after = round(base * width)
            self.add_module(f"conv{i}", nn.Conv2d(before, after, kernel, stride))
            self.add_module(f"bn{i}", nn.BatchNorm2d(after))
            before = after
        self.fc = nn.Linear(before, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, len(CONVOLUTIONS) + 1):
            convolve, normalise = self.get_submodule(f"conv{i}"), self.get_submodule(f"bn{i}")
            x = F.relu(normalise(convolve(x)))
        return self.fc(x.mean((2, 3)))


def _read_options(state: State) -> dict[str, Any]:
    first = dimension(state, "conv1.weight", 0)
    return {
        "classes": dimension(state, "fc.weight", 0),
        "channels": dimension(state, "conv1.weight", 1),
        "width": first and first / CONVOLUTIONS[0][0],
    }


@architecture(_read_options)
def tiny10(classes: int = 10, channels: int = 3, width: float = 1) -> nn.Module:
    """Tiny-10 of Csiszárik et al. 2021, for images of at least 27 × 27."""
    return Tiny10(classes, channels, width)
