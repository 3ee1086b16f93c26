"""VGG-11 with and without batch norm, torchvision's parameter names, with a head for any image size."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .atoms import with_atoms
from .layers import initialise
from .registry import State, architecture, count_atoms, dimension

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # a pooling follows each


class VGG(nn.Module):
    """Eight convolutions (`features.N`) and three linear layers (`classifier.N`)."""

    def __init__(
        self, *, classes: int, size: int, hidden: int, batch_norm: bool, channels: int, dropout: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for stage in STAGES:
            for after in stage:
                layers.append(nn.Conv2d(before, after, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(after))
                layers.append(nn.ReLU())
                before = after
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        side = max(1, size // 32)
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = nn.Sequential(
            *(nn.Linear(before * side * side, hidden), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(hidden, classes),
        )
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _read_options(state: State) -> dict[str, Any]:
    inputs = dimension(state, "classifier.0.weight", 1)
    return {
        "classes": dimension(state, "classifier.6.weight", 0),
        "size": inputs and 32 * max(1, math.isqrt(inputs // STAGES[-1][-1])),
        "hidden": dimension(state, "classifier.0.weight", 0),
        "channels": dimension(state, "features.0.weight", 1) or dimension(state, "features.0.coefficients", 1),
        "atoms": count_atoms(state),
    }


@architecture(_read_options)
def vgg11(
    classes: int = 10,
    size: int = 32,
    hidden: int = 512,
    channels: int = 3,
    dropout: float = 0.5,
    atoms: int | None = None,
) -> nn.Module:
    """VGG-11 of Simonyan and Zisserman 2015, for CIFAR by default.

    `vgg11(classes=1000, size=224, hidden=4096)` has the shapes of the ImageNet network. `atoms`: convolutions are made
    of at most so many filter atoms each (`AtomConv2d`).
    """
    return _vgg11(
        atoms, batch_norm=False, classes=classes, size=size, hidden=hidden, channels=channels, dropout=dropout
    )


@architecture(_read_options)
def vgg11_bn(
    classes: int = 10,
    size: int = 32,
    hidden: int = 512,
    channels: int = 3,
    dropout: float = 0.5,
    atoms: int | None = None,
) -> nn.Module:
    """VGG-11 with a batch norm after each convolution; options as for `vgg11`."""
    return _vgg11(atoms, batch_norm=True, classes=classes, size=size, hidden=hidden, channels=channels, dropout=dropout)


def _vgg11(atoms: int | None, **options: Any) -> nn.Module:
    model = VGG(**options)
    return model if atoms is None else with_atoms(model, atoms)
