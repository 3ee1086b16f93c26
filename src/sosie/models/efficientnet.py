"""EfficientNet-Lite, with the parameter names of the published PyTorch port."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .registry import State, architecture, dimension, initialise

# blocks, kernel, stride of the first block, expansion, channels out (all at width and depth 1)
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, TOP = 32, 1280  # the Lite variants do not scale these


class SameConv2d(nn.Conv2d):
    """A convolution padded as TensorFlow's SAME: an odd row or column goes to the bottom or right."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self._padding_of(x.shape[2], 0)
        columns = self._padding_of(x.shape[3], 1)
        return super().forward(F.pad(x, (*columns, *rows)))

    def _padding_of(self, length: int, axis: int) -> tuple[int, int]:
        kernel, stride = self.kernel_size[axis], self.stride[axis]
        outputs = math.ceil(length / stride)
        total = max((outputs - 1) * stride + kernel - length, 0)
        return total // 2, total - total // 2


def batch_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class InvertedBlock(nn.Module):
    """Widen by 1 × 1, convolve each channel by itself, narrow by 1 × 1; added to the input if it fits."""

    def __init__(self, before: int, after: int, *, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = before * expansion
        self.widens = expansion != 1
        self.adds = stride == 1 and before == after
        if self.widens:
            self._expand_conv = nn.Conv2d(before, inner, 1, bias=False)
            self._bn0 = batch_norm(inner)
        self._depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner, bias=False)
        self._bn1 = batch_norm(inner)
        self._project_conv = nn.Conv2d(inner, after, 1, bias=False)
        self._bn2 = batch_norm(after)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.widens else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.adds else y


class EfficientNetLite(nn.Module):
    """_conv_stem, `_blocks.N`, _conv_head, mean over space, _fc."""

    def __init__(self, *, width: float, depth: float, classes: int, channels: int) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(channels, STEM, 3, 2, bias=False)
        self._bn0 = batch_norm(STEM)
        blocks, before = [], STEM
        for i, (count, kernel, stride, expansion, base) in enumerate(STAGES):
            after = _round_to_eight(base * width)
            fixed = i in (0, len(STAGES) - 1)  # the Lite variants do not deepen the outer stages
            for j in range(count if fixed else math.ceil(count * depth)):
                step = stride if j == 0 else 1
                blocks.append(InvertedBlock(before, after, kernel=kernel, stride=step, expansion=expansion))
                before = after
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = nn.Conv2d(before, TOP, 1, bias=False)
        self._bn1 = batch_norm(TOP)
        self._dropout = nn.Dropout(0.2)
        self._fc = nn.Linear(TOP, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        x = self._blocks(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        return self._fc(self._dropout(x.mean((2, 3))))


def _round_to_eight(channels: float) -> int:
    """The nearest multiple of 8, but never more than a tenth below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _read_options(state: State) -> dict[str, Any]:
    return {"classes": dimension(state, "_fc.weight", 0), "channels": dimension(state, "_conv_stem.weight", 1)}


@architecture(_read_options)
def efficientnet_lite0(classes: int = 1000, channels: int = 3) -> nn.Module:
    """EfficientNet-Lite0, for 224 × 224 images given as (255 x - 127) / 128."""
    return EfficientNetLite(width=1.0, depth=1.0, classes=classes, channels=channels)


@architecture(_read_options)
def efficientnet_lite1(classes: int = 1000, channels: int = 3) -> nn.Module:
    """EfficientNet-Lite1, for 240 × 240 images."""
    return EfficientNetLite(width=1.0, depth=1.1, classes=classes, channels=channels)


@architecture(_read_options)
def efficientnet_lite2(classes: int = 1000, channels: int = 3) -> nn.Module:
    """EfficientNet-Lite2, for 260 × 260 images."""
    return EfficientNetLite(width=1.1, depth=1.2, classes=classes, channels=channels)
