"""Residual networks for CIFAR: any depth 6n + 2, any width, both kinds of shortcut."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import initialise
from .registry import State, architecture, count_blocks, dimension

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
        self.downsample: nn.Sequential | None = None  # None is no child: the leaves stay conv, bn and head
        if shortcut == "B" and (stride != 1 or before != after):
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self._short_cut(x))

    def _short_cut(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            return self.downsample(x)
        if self.stride == 1 and self.extra == 0:
            return x
        low = self.extra // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, low, self.extra - low))


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


def _read_options(state: State) -> dict[str, Any]:
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


@architecture(_read_options)
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
    if shortcut not in ("A", "B"):
        raise ValueError(f"shortcut {shortcut!r}: 'A' (stride and zero channels) or 'B' (1 × 1 convolution)")
    if round(STAGES[0] * width) < 1:
        raise ValueError(f"width {width} leaves no channels; 1 gives {STAGES}")
    head = head or ("linear" if shortcut == "A" else "fc")
    return CifarResNet(depth, classes=classes, width=width, shortcut=shortcut, head=head, channels=channels)
