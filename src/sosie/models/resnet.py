"""Residual networks for ImageNet, torchvision's parameter names and shapes, and a stem for small images."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from .layers import initialise
from .registry import State, architecture, dimension

Stem = Literal["imagenet", "cifar"]


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 (which strides, as in torchvision), 1 × 1 to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * self.expansion
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU()
        self.downsample = shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def shortcut(before: int, after: int, stride: int) -> nn.Sequential | None:
    """A 1 × 1 convolution with batch norm where the shape changes, else None (the input itself)."""
    if stride == 1 and before == after:
        return None
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


class ResNet(nn.Module):
    """conv1, bn1, relu, maxpool, layer1 … layer4, avgpool, fc."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        classes: int,
        stem: Stem,
        channels: int,
    ) -> None:
        super().__init__()
        if stem not in ("imagenet", "cifar"):
            raise ValueError(f"stem {stem!r}: 'imagenet' (7 × 7, stride 2, pooled) or 'cifar' (3 × 3, stride 1)")
        small = stem == "cifar"
        self.conv1 = nn.Conv2d(channels, 64, *((3, 1, 1) if small else (7, 2, 3)), bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        before = 64
        for i, depth in enumerate(depths):
            width, blocks = 64 * 2**i, []
            for j in range(depth):
                blocks.append(block(before, width, 2 if i > 0 and j == 0 else 1))
                before = width * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def _read_options(state: State) -> dict[str, Any]:
    kernel = dimension(state, "conv1.weight", 2)
    return {
        "classes": dimension(state, "fc.weight", 0),
        "stem": kernel and ("cifar" if kernel == 3 else "imagenet"),
        "channels": dimension(state, "conv1.weight", 1),
    }


@architecture(_read_options)
def resnet18(classes: int = 1000, stem: Stem = "imagenet", channels: int = 3) -> nn.Module:
    """ResNet-18 of He et al. 2016 (ImageNet family); `stem='cifar'` for 32 × 32 images."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, stem=stem, channels=channels)


@architecture(_read_options)
def resnet34(classes: int = 1000, stem: Stem = "imagenet", channels: int = 3) -> nn.Module:
    """ResNet-34 (ImageNet family)."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes=classes, stem=stem, channels=channels)


@architecture(_read_options)
def resnet50(classes: int = 1000, stem: Stem = "imagenet", channels: int = 3) -> nn.Module:
    """ResNet-50 (ImageNet family); the CIFAR network of depth 50 is `cifar_resnet(depth=50)`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes=classes, stem=stem, channels=channels)


@architecture(_read_options)
def resnet101(classes: int = 1000, stem: Stem = "imagenet", channels: int = 3) -> nn.Module:
    """ResNet-101 (ImageNet family)."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes=classes, stem=stem, channels=channels)


@architecture(_read_options)
def resnet152(classes: int = 1000, stem: Stem = "imagenet", channels: int = 3) -> nn.Module:
    """ResNet-152 (ImageNet family)."""
    return ResNet(Bottleneck, (3, 8, 36, 3), classes=classes, stem=stem, channels=channels)
