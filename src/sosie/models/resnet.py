"""Residual networks: the ImageNet family with torchvision's names and shapes, and the CIFAR family of depth 6n + 2."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import one_of
from .registry import State, architecture, count_blocks, dimension, initialise

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
        self.downsample = projection(before, width, stride)

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
        self.downsample = projection(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def projection(before: int, after: int, stride: int) -> nn.Sequential | None:
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
        small = one_of(stem, "stem", ("imagenet", "cifar")) == "cifar"  # 3 × 3, stride 1; or 7 × 7, stride 2, pooled
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


# Residual networks for CIFAR: any depth 6n + 2, any width, both kinds of shortcut

STAGES = (16, 32, 64)  # channels at width 1


class CifarBlock(nn.Module):
    """Two 3 × 3 convolutions added to the input, or to its shortcut where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.stride, self.extra = stride, after - before
        # None is not registered as a child: the leaves stay conv, bn and head.
        self.downsample = projection(before, after, stride) if shortcut == "B" else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.stride != 1 or self.extra:
            low = self.extra // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, low, self.extra - low))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """conv1, bn1, layer1 … layer3 of n blocks each, mean over space, and a head called `head`."""

    def __init__(self, depth: int, *, classes: int, width: float, shortcut: str, head: str, channels: int) -> None:
        super().__init__()
        widths = [round(base * width) for base in STAGES]
        self.conv1 = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        before = widths[0]
        for i, after in enumerate(widths, 1):
            blocks = []
            for j in range((depth - 2) // 6):
                blocks.append(CifarBlock(before, after, 2 if i > 1 and j == 0 else 1, shortcut))
                before = after
            self.add_module(f"layer{i}", nn.Sequential(*blocks))
        self.head_name = head
        self.add_module(head, nn.Linear(before, classes))
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for i in range(1, len(STAGES) + 1):
            x = self.get_submodule(f"layer{i}")(x)
        return self.get_submodule(self.head_name)(x.mean((2, 3)))


def _read_cifar_resnet(state: State) -> dict[str, Any]:
    first, blocks = dimension(state, "conv1.weight", 0), count_blocks(state, "layer1")
    head = "fc" if "fc.weight" in state else "linear"
    return {
        "depth": blocks and 6 * blocks + 2,
        "classes": dimension(state, f"{head}.weight", 0),
        "width": first and first / STAGES[0],
        "shortcut": "B" if any(".downsample." in name for name in state) else "A",
        "head": head,
        "channels": dimension(state, "conv1.weight", 1),
    }


@architecture(_read_cifar_resnet)
def cifar_resnet(
    depth: int = 20,
    classes: int = 10,
    width: float = 1,
    shortcut: Literal["A", "B"] = "A",
    head: str | None = None,
    channels: int = 3,
) -> nn.Module:
    """The CIFAR network of He et al. 2016; also opened as `resnet20`, `resnet56` … `resnet<6n+2>`.

    Shortcut A strides and pads with zero channels; B is a 1 × 1 convolution with batch norm. The head is
    called `linear` with A and `fc` with B (as in the published files) unless `head` says otherwise.
    """
    if not isinstance(depth, int) or depth < 8 or (depth - 2) % 6:
        near = sorted({6 * max(1, round((depth - 2) / 6) + k) + 2 for k in (-1, 0, 1)}, key=lambda d: abs(d - depth))
        raise ValueError(f"a CIFAR ResNet has depth 6n + 2, not {depth}; nearest: {near[0]} and {near[1]}")
    one_of(shortcut, "shortcut", ("A", "B"))
    if round(STAGES[0] * width) < 1:
        raise ValueError(f"width {width} leaves no channels; 1 gives {STAGES}")
    head = head or ("linear" if shortcut == "A" else "fc")
    return CifarResNet(depth, classes=classes, width=width, shortcut=shortcut, head=head, channels=channels)
