"""A small convolutional network for 28 × 28 grey images, trained in seconds on a laptop."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from torch import nn

from .atoms import with_atoms
from .layers import initialise
from .registry import State, architecture, count_atoms, dimension

POOLINGS = 3


def _read_options(state: State) -> dict[str, Any]:
    kernels = "weight" if "conv1.weight" in state else "coefficients"
    last, inputs = dimension(state, f"conv4.{kernels}", 0), dimension(state, "fc.weight", 1)
    return {
        "classes": dimension(state, "fc.weight", 0),
        "width": dimension(state, f"conv1.{kernels}", 0),
        "channels": dimension(state, f"conv1.{kernels}", 1),
        "size": last and inputs and 2**POOLINGS * math.isqrt(inputs // last),
        "atoms": count_atoms(state),
    }


@architecture(_read_options)
def small_cnn(
    classes: int = 10, width: int = 16, channels: int = 1, size: int = 28, atoms: int | None = None
) -> nn.Module:
    """conv1, relu1, pool1 … conv4, relu4, flatten, fc: 38 thousand parameters for 28 × 28 images.

    `atoms`: convolutions are made of at most so many filter atoms each (`AtomConv2d`).
    """
    if size < 2**POOLINGS:
        raise ValueError(f"images of side {size} are pooled away: {2**POOLINGS} is the least")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    before = channels
    for i, after in enumerate((width, 2 * width, 2 * width, 4 * width), 1):
        layers[f"conv{i}"] = nn.Conv2d(before, after, 3, padding=1)
        layers[f"relu{i}"] = nn.ReLU()
        if i <= POOLINGS:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
        before = after
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(before * (size // 2**POOLINGS) ** 2, classes)
    model = nn.Sequential(layers)
    initialise(model)
    return model if atoms is None else with_atoms(model, atoms)
