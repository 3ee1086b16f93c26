"""A small convolutional network for 28 × 28 grey images, trained in seconds on a laptop."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from .registry import State, architecture, dimension


def _read_options(state: State) -> dict[str, Any]:
    return {
        "classes": dimension(state, "fc.weight", 0),
        "width": dimension(state, "conv1.weight", 0),
        "channels": dimension(state, "conv1.weight", 1),
    }


@architecture(_read_options)
def small_cnn(classes: int = 10, width: int = 16, channels: int = 1) -> nn.Module:
    """Four 3 × 3 convolutions with a ReLU after each, three poolings, one linear layer; images from 8 × 8."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    before = channels
    for i, after in enumerate((width, 2 * width, 2 * width, 4 * width), 1):
        layers[f"conv{i}"] = nn.Conv2d(before, after, 3, padding=1)
        layers[f"relu{i}"] = nn.ReLU()
        if i < 4:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
        before = after
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(before, classes)
    return nn.Sequential(layers)
