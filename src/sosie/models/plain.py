"""Plain convolutional networks: small_cnn for grey images, Tiny-10, AlexNet and VGG-11."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .atoms import with_atoms
from .registry import State, architecture, count_atoms, dimension, initialise

# small_cnn, for 28 × 28 grey images: trained in seconds on a laptop

POOLINGS = 3


def _read_small_cnn(state: State) -> dict[str, Any]:
    kernels = "weight" if "conv1.weight" in state else "coefficients"
    last, inputs = dimension(state, f"conv4.{kernels}", 0), dimension(state, "fc.weight", 1)
    return {
        "classes": dimension(state, "fc.weight", 0),
        "width": dimension(state, f"conv1.{kernels}", 0),
        "channels": dimension(state, f"conv1.{kernels}", 1),
        "size": last and inputs and 2**POOLINGS * math.isqrt(inputs // last),
        "atoms": count_atoms(state),
    }


@architecture(_read_small_cnn)
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


# Tiny-10: eight un-padded convolutions for 32 × 32 images

# output channels at width 1, kernel, stride
CONVOLUTIONS = ((16, 3, 1), (16, 3, 1), (32, 3, 2), (32, 3, 1), (32, 3, 1), (64, 3, 2), (64, 3, 1), (64, 1, 1))


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


def _read_tiny10(state: State) -> dict[str, Any]:
    first = dimension(state, "conv1.weight", 0)
    return {
        "classes": dimension(state, "fc.weight", 0),
        "channels": dimension(state, "conv1.weight", 1),
        "width": first and first / CONVOLUTIONS[0][0],
    }


@architecture(_read_tiny10)
def tiny10(classes: int = 10, channels: int = 3, width: float = 1) -> nn.Module:
    """Tiny-10 of Csiszárik et al. 2021, for images of at least 27 × 27."""
    return Tiny10(classes, channels, width)


# AlexNet for 32 × 32 images


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


def _read_alexnet(state: State) -> dict[str, Any]:
    return {
        "classes": dimension(state, "classifier.6.weight", 0),
        "hidden": dimension(state, "classifier.1.weight", 0),
        "channels": dimension(state, "features.0.weight", 1) or dimension(state, "features.0.coefficients", 1),
        "atoms": count_atoms(state),
    }


@architecture(_read_alexnet)
def alexnet(
    classes: int = 10, hidden: int = 1024, channels: int = 3, dropout: float = 0.5, atoms: int | None = None
) -> nn.Module:
    """AlexNet of Krizhevsky et al. 2012 fitted to CIFAR: stride 1 in the first layer, a narrower head.

    `atoms`: convolutions are made of at most so many filter atoms each (`AtomConv2d`).
    """
    model = AlexNet(classes, hidden, channels, dropout)
    return model if atoms is None else with_atoms(model, atoms)


# VGG-11 with and without batch norm, torchvision's parameter names, with a head for any image size

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # a pooling follows each


class VGG(nn.Module):
    """Eight convolutions (`features.N`) and three linear layers (`classifier.N`)."""

    def __init__(
        self, classes: int, size: int, hidden: int, channels: int, dropout: float, *, batch_norm: bool = False
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


def _read_vgg(state: State) -> dict[str, Any]:
    inputs = dimension(state, "classifier.0.weight", 1)
    return {
        "classes": dimension(state, "classifier.6.weight", 0),
        "size": inputs and 32 * max(1, math.isqrt(inputs // STAGES[-1][-1])),
        "hidden": dimension(state, "classifier.0.weight", 0),
        "channels": dimension(state, "features.0.weight", 1) or dimension(state, "features.0.coefficients", 1),
        "atoms": count_atoms(state),
    }


@architecture(_read_vgg)
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
    model = VGG(classes, size, hidden, channels, dropout)
    return model if atoms is None else with_atoms(model, atoms)


@architecture(_read_vgg)
def vgg11_bn(
    classes: int = 10,
    size: int = 32,
    hidden: int = 512,
    channels: int = 3,
    dropout: float = 0.5,
    atoms: int | None = None,
) -> nn.Module:
    """VGG-11 with a batch norm after each convolution; options as for `vgg11`."""
    model = VGG(classes, size, hidden, channels, dropout, batch_norm=True)
    return model if atoms is None else with_atoms(model, atoms)
