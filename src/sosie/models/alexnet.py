"""AlexNet for 32 × 32 images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .atoms import with_atoms
from .layers import initialise
from .registry import State, architecture, count_atoms, dimension


class AlexNet(nn.Module):
    """Five convolutions (`features.N`) and three linear layers (`classifier.N`), a ReLU between any two."""

    def __init__(self, classes: int, hidden: int, channels: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(channels, 64, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(4)
        self.classifier = nn.Sequential(
            *(nn.Dropout(dropout), nn.Linear(256 * 16, hidden), nn.ReLU()),
            *(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()),
            nn.Linear(hidden, classes),
        )
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _read_options(state: State) -> dict[str, Any]:
    return {
        "classes": dimension(state, "classifier.6.weight", 0),
        "hidden": dimension(state, "classifier.1.weight", 0),
        "channels": dimension(state, "features.0.weight", 1) or dimension(state, "features.0.coefficients", 1),
        "atoms": count_atoms(state),
    }


@architecture(_read_options)
def alexnet(
    classes: int = 10, hidden: int = 1024, channels: int = 3, dropout: float = 0.5, atoms: int | None = None
) -> nn.Module:
    """AlexNet of Krizhevsky et al. 2012 fitted to CIFAR: stride 1 in the first layer, a narrower head.

    `atoms`: convolutions are made of at most so many filter atoms each (`AtomConv2d`).
    """
    model = AlexNet(classes, hidden, channels, dropout)
    return model if atoms is None else with_atoms(model, atoms)
