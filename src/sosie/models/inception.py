"""Inception V1 (GoogLeNet with batch norm), torchvision's parameter names, for large and small images."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import one_of
from .registry import State, architecture, dimension, initialise

# module: channels in; out of branch 1; reduce, out of branch 2; reduce, out of branch 3; out of branch 4
MODULES = {
    "inception3a": (192, 64, 96, 128, 16, 32, 32),
    "inception3b": (256, 128, 128, 192, 32, 96, 64),
    "inception4a": (480, 192, 96, 208, 16, 48, 64),
    "inception4b": (512, 160, 112, 224, 24, 64, 64),
    "inception4c": (512, 128, 128, 256, 24, 64, 64),
    "inception4d": (512, 112, 144, 288, 32, 64, 64),
    "inception4e": (528, 256, 160, 320, 32, 128, 128),
    "inception5a": (832, 256, 160, 320, 32, 128, 128),
    "inception5b": (832, 384, 192, 384, 48, 128, 128),
}


class ConvNorm(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(after, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Inception(nn.Module):
    """Four branches side by side: 1 × 1; 1 × 1 then 3 × 3, twice; pooled then 1 × 1.

    The third branch has a 3 × 3 kernel where the paper has 5 × 5: so have the published weights.
    """

    def __init__(self, before: int, one: int, thin2: int, two: int, thin3: int, three: int, four: int) -> None:
        super().__init__()
        self.branch1 = ConvNorm(before, one, 1)
        self.branch2 = nn.Sequential(ConvNorm(before, thin2, 1), ConvNorm(thin2, two, 3))
        self.branch3 = nn.Sequential(ConvNorm(before, thin3, 1), ConvNorm(thin3, three, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), ConvNorm(before, four, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class InceptionV1(nn.Module):
    """conv1 … conv3, inception3a … inception5b with pooling between the stages, mean over space, fc."""

    def __init__(self, classes: int, stem: str, channels: int) -> None:
        super().__init__()
        small = stem == "cifar"
        self.conv1 = ConvNorm(channels, 64, 3 if small else 7, 1 if small else 2)
        self.maxpool1 = nn.Identity() if small else nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2 = ConvNorm(64, 64, 1)
        self.conv3 = ConvNorm(64, 192, 3)
        self.maxpool2 = nn.Identity() if small else nn.MaxPool2d(3, 2, ceil_mode=True)
        for name, widths in MODULES.items():
            self.add_module(name, Inception(*widths))
        self.maxpool3 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.maxpool4 = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(1024, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool1(self.conv1(x))
        x = self.maxpool2(self.conv3(self.conv2(x)))
        for name in MODULES:
            x = self.get_submodule(name)(x)
            if name == "inception3b":
                x = self.maxpool3(x)
            elif name == "inception4e":
                x = self.maxpool4(x)
        return self.fc(self.dropout(self.avgpool(x).flatten(1)))


def _read_options(state: State) -> dict[str, Any]:
    kernel = dimension(state, "conv1.conv.weight", 2)
    return {
        "classes": dimension(state, "fc.weight", 0),
        "stem": kernel and ("cifar" if kernel == 3 else "imagenet"),
        "channels": dimension(state, "conv1.conv.weight", 1),
    }


@architecture(_read_options, ignore=("aux1.", "aux2."))
def inception_v1(classes: int = 1000, stem: Literal["imagenet", "cifar"] = "imagenet", channels: int = 3) -> nn.Module:
    """Inception V1 of Szegedy et al. 2015 without its training-only side heads.

    `stem='cifar'` keeps the resolution of a 32 × 32 image up to `inception3b`.
    """
    return InceptionV1(classes, one_of(stem, "stem", ("imagenet", "cifar")), channels)
