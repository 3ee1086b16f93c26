"""Convolutional networks: small_cnn, Tiny-10, AlexNet, VGG-11, ResNets, Inception V1, EfficientNet-Lite."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import one_of
from .atoms import with_atoms
from .specification import State, architecture, count_atoms, count_blocks, dimension

Stem = Literal["imagenet", "cifar"]  # the first layers shrink an image by 4 in each direction, or not at all


def initialise(model: nn.Module) -> None:
    """Initialise convolutions as in He et al. 2015 (fan out) and batch norms as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


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

    `atoms`: convolutions are made of at most this many filter atoms each (`AtomConv2d`).
    """
    if size < 2**POOLINGS:
        raise ValueError(f"images of side {size} are too small to pool: need at least {2**POOLINGS}")
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


# Tiny-10: eight unpadded convolutions for 32 × 32 images

# output channels at width 1, kernel, stride
TINY10 = ((16, 3, 1), (16, 3, 1), (32, 3, 2), (32, 3, 1), (32, 3, 1), (64, 3, 2), (64, 3, 1), (64, 1, 1))


def _read_tiny10(state: State) -> dict[str, Any]:
    first = dimension(state, "conv1.weight", 0)
    return {
        "classes": dimension(state, "fc.weight", 0),
        "channels": dimension(state, "conv1.weight", 1),
        "width": first and first / TINY10[0][0],
    }


@architecture(_read_tiny10, name="tiny10")
class Tiny10(nn.Module):
    """Tiny-10 of Csiszárik et al. 2021, for images of at least 27 × 27.

    conv1, bn1, … conv8, bn8 (a ReLU after each), mean over space, fc: 86,778 parameters at width 1.
    """

    def __init__(self, classes: int = 10, channels: int = 3, width: float = 1) -> None:
        super().__init__()
        before = channels
        for i, (base, kernel, stride) in enumerate(TINY10, 1):
            after = round(base * width)
            self.add_module(f"conv{i}", nn.Conv2d(before, after, kernel, stride))
            self.add_module(f"bn{i}", nn.BatchNorm2d(after))
            before = after
        self.fc = nn.Linear(before, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, len(TINY10) + 1):
            convolve, normalise = self.get_submodule(f"conv{i}"), self.get_submodule(f"bn{i}")
            x = F.relu(normalise(convolve(x)))
        return self.fc(x.mean((2, 3)))


tiny10 = Tiny10


# AlexNet for 32 × 32 images


class AlexNet(nn.Module):
    """Convolutions (`features.N`), a mean over parts of the image, and linear layers (`classifier.N`)."""

    def __init__(self, features: list[nn.Module], side: int, classifier: list[nn.Module]) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = nn.Sequential(*classifier)
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
    """AlexNet of Krizhevsky et al. 2012, adapted to CIFAR: stride 1 in the first layer, a narrower head.

    `atoms`: convolutions are made of at most this many filter atoms each (`AtomConv2d`).
    """
    features = [
        *(nn.Conv2d(channels, 64, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    ]
    classifier = [
        *(nn.Dropout(dropout), nn.Linear(256 * 16, hidden), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    ]
    model = AlexNet(features, 4, classifier)
    return model if atoms is None else with_atoms(model, atoms)


# VGG-11 with and without batch norm, with torchvision's parameter names and a head for any image size

VGG_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # a pooling follows each


class VGG(AlexNet):
    """A deeper network with parts of the same names."""


def _read_vgg(state: State) -> dict[str, Any]:
    inputs = dimension(state, "classifier.0.weight", 1)
    return {
        **_read_alexnet(state),
        "size": inputs and 32 * max(1, math.isqrt(inputs // VGG_STAGES[-1][-1])),
        "hidden": dimension(state, "classifier.0.weight", 0),
    }


@architecture(_read_vgg)
def vgg11(
    classes: int = 10,
    size: int = 32,
    hidden: int = 512,
    channels: int = 3,
    dropout: float = 0.5,
    atoms: int | None = None,
    batch_norm: bool = False,
) -> nn.Module:
    """VGG-11 of Simonyan and Zisserman 2015, for CIFAR by default; `vgg11_bn` has a batch norm after each convolution.

    `vgg11(classes=1000, size=224, hidden=4096)` has the shapes of the ImageNet network; `atoms` as in `alexnet`.
    """
    features: list[nn.Module] = []
    for stage in VGG_STAGES:
        for width in stage:
            norm = [nn.BatchNorm2d(width)] if batch_norm else []
            features += [nn.Conv2d(channels, width, 3, padding=1), *norm, nn.ReLU()]
            channels = width
        features.append(nn.MaxPool2d(2, 2))
    side = max(1, size // 32)
    classifier = [
        *(nn.Linear(channels * side * side, hidden), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(hidden, classes),
    ]
    model = VGG(features, side, classifier)
    return model if atoms is None else with_atoms(model, atoms)


vgg11_bn = architecture(_read_vgg, name="vgg11_bn")(partial(vgg11, batch_norm=True))


# Residual networks for ImageNet, with torchvision's names and shapes


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
    """Return a 1 × 1 convolution with batch norm if the shape changes, else None (the identity)."""
    if stride == 1 and before == after:
        return None
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


class ResNet(nn.Module):
    """A network of He et al. 2016 for ImageNet; `stem='cifar'` for 32 × 32 images.

    conv1, bn1, relu, maxpool, layer1 … layer4, avgpool, fc.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        /,
        classes: int = 1000,
        stem: Stem = "imagenet",
        channels: int = 3,
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


def _read_resnet(state: State) -> dict[str, Any]:
    """Read the options of a ResNet, or of Inception V1, whose first convolution has a batch norm beside it."""
    first = "conv1.weight" if "conv1.weight" in state else "conv1.conv.weight"
    kernel = dimension(state, first, 2)
    return {
        "classes": dimension(state, "fc.weight", 0),
        "stem": kernel and ("cifar" if kernel == 3 else "imagenet"),
        "channels": dimension(state, first, 1),
    }


# The CIFAR networks of depth 50 and 152 are cifar_resnet(depth=50) and cifar_resnet(depth=152).
resnet18 = architecture(_read_resnet, name="resnet18")(partial(ResNet, BasicBlock, (2, 2, 2, 2)))
resnet34 = architecture(_read_resnet, name="resnet34")(partial(ResNet, BasicBlock, (3, 4, 6, 3)))
resnet50 = architecture(_read_resnet, name="resnet50")(partial(ResNet, Bottleneck, (3, 4, 6, 3)))
resnet101 = architecture(_read_resnet, name="resnet101")(partial(ResNet, Bottleneck, (3, 4, 23, 3)))
resnet152 = architecture(_read_resnet, name="resnet152")(partial(ResNet, Bottleneck, (3, 8, 36, 3)))


# Residual networks for CIFAR: any depth 6n + 2, any width, both kinds of shortcut

CIFAR_WIDTHS = (16, 32, 64)  # channels at width 1


class CifarBlock(nn.Module):
    """Two 3 × 3 convolutions added to the input, or to its shortcut where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.stride, self.extra = stride, after - before
        # None is not registered as a child, so the leaves are conv, bn and head.
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


def _read_cifar_resnet(state: State) -> dict[str, Any]:
    first, blocks = dimension(state, "conv1.weight", 0), count_blocks(state, "layer1")
    head = "fc" if "fc.weight" in state else "linear"
    return {
        "depth": blocks and 6 * blocks + 2,
        "classes": dimension(state, f"{head}.weight", 0),
        "width": first and first / CIFAR_WIDTHS[0],
        "shortcut": "B" if any(".downsample." in name for name in state) else "A",
        "head": head,
        "channels": dimension(state, "conv1.weight", 1),
    }


@architecture(_read_cifar_resnet, name="cifar_resnet")
class CifarResNet(nn.Module):
    """The CIFAR network of He et al. 2016; also opened as `resnet20`, `resnet56` … `resnet<6n+2>`.

    conv1, bn1, layer1 … layer3 of n blocks each, mean over space, and a head. Shortcut A strides and pads with zero
    channels; B is a 1 × 1 convolution with batch norm. The head is called `linear` with A and `fc` with B, as in the
    published files, unless `head` is given.
    """

    def __init__(
        self,
        depth: int = 20,
        classes: int = 10,
        width: float = 1,
        shortcut: Literal["A", "B"] = "A",
        head: str | None = None,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if not isinstance(depth, int) or depth < 8 or (depth - 2) % 6:
            n = max(1, round((depth - 2) / 6))
            near = sorted({6 * max(1, n + k) + 2 for k in (-1, 0, 1)}, key=lambda d: abs(d - depth))
            raise ValueError(f"a CIFAR ResNet has depth 6n + 2, not {depth}; nearest: {near[0]} and {near[1]}")
        one_of(shortcut, "shortcut", ("A", "B"))
        widths = [round(base * width) for base in CIFAR_WIDTHS]
        if not widths[0]:
            raise ValueError(f"width {width} leaves no channels; width 1 gives {CIFAR_WIDTHS}")
        self.conv1 = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        before = widths[0]
        for i, after in enumerate(widths, 1):
            blocks = []
            for j in range((depth - 2) // 6):
                blocks.append(CifarBlock(before, after, 2 if i > 1 and j == 0 else 1, shortcut))
                before = after
            self.add_module(f"layer{i}", nn.Sequential(*blocks))
        self.head_name = head or ("linear" if shortcut == "A" else "fc")
        self.add_module(self.head_name, nn.Linear(before, classes))
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for i in range(1, len(CIFAR_WIDTHS) + 1):
            x = self.get_submodule(f"layer{i}")(x)
        return self.get_submodule(self.head_name)(x.mean((2, 3)))


cifar_resnet = CifarResNet


# Inception V1 (GoogLeNet with batch norm) with torchvision's parameter names, for large and small images

# module: channels in; out of branch 1; reduce, out of branch 2; reduce, out of branch 3; out of branch 4
INCEPTIONS = {
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

    The third branch has a 3 × 3 kernel where the paper has 5 × 5, as in the published weights.
    """

    def __init__(self, before: int, one: int, thin2: int, two: int, thin3: int, three: int, four: int) -> None:
        super().__init__()
        self.branch1 = ConvNorm(before, one, 1)
        self.branch2 = nn.Sequential(ConvNorm(before, thin2, 1), ConvNorm(thin2, two, 3))
        self.branch3 = nn.Sequential(ConvNorm(before, thin3, 1), ConvNorm(thin3, three, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), ConvNorm(before, four, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


@architecture(_read_resnet, name="inception_v1", ignore=("aux1.", "aux2."))
class InceptionV1(nn.Module):
    """Inception V1 of Szegedy et al. 2015 without the auxiliary heads of training.

    conv1 … conv3, inception3a … inception5b with pooling between the stages, mean over space, fc. `stem='cifar'` keeps
    the resolution of a 32 × 32 image up to `inception3b`.
    """

    def __init__(self, classes: int = 1000, stem: Stem = "imagenet", channels: int = 3) -> None:
        super().__init__()
        small = one_of(stem, "stem", ("imagenet", "cifar")) == "cifar"
        self.conv1 = ConvNorm(channels, 64, 3 if small else 7, 1 if small else 2)
        self.maxpool1 = nn.Identity() if small else nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2 = ConvNorm(64, 64, 1)
        self.conv3 = ConvNorm(64, 192, 3)
        self.maxpool2 = nn.Identity() if small else nn.MaxPool2d(3, 2, ceil_mode=True)
        for name, widths in INCEPTIONS.items():
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
        for name in INCEPTIONS:
            x = self.get_submodule(name)(x)
            if name == "inception3b":
                x = self.maxpool3(x)
            elif name == "inception4e":
                x = self.maxpool4(x)
        return self.fc(self.dropout(self.avgpool(x).flatten(1)))


inception_v1 = InceptionV1


# EfficientNet-Lite, with the parameter names of the published PyTorch port

# blocks, kernel, stride of the first block, expansion, channels out (all at width and depth 1)
LITE_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
LITE_STEM, LITE_TOP = 32, 1280  # the Lite variants do not scale these


class SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding: an odd row or column goes to the bottom or right."""

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
    """Widen by 1 × 1, convolve each channel, narrow by 1 × 1; added to the input if the shape stays the same."""

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

    def __init__(self, width: float, depth: float, /, classes: int = 1000, channels: int = 3) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(channels, LITE_STEM, 3, 2, bias=False)
        self._bn0 = batch_norm(LITE_STEM)
        blocks, before = [], LITE_STEM
        for i, (count, kernel, stride, expansion, base) in enumerate(LITE_STAGES):
            after = _round_to_eight(base * width)
            fixed = i in (0, len(LITE_STAGES) - 1)  # the Lite variants do not deepen the outer stages
            for j in range(count if fixed else math.ceil(count * depth)):
                step = stride if j == 0 else 1
                blocks.append(InvertedBlock(before, after, kernel=kernel, stride=step, expansion=expansion))
                before = after
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = nn.Conv2d(before, LITE_TOP, 1, bias=False)
        self._bn1 = batch_norm(LITE_TOP)
        self._dropout = nn.Dropout(0.2)
        self._fc = nn.Linear(LITE_TOP, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        x = self._blocks(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        return self._fc(self._dropout(x.mean((2, 3))))


def _round_to_eight(channels: float) -> int:
    """Return the nearest multiple of 8, but never more than a tenth below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _read_lite(state: State) -> dict[str, Any]:
    return {"classes": dimension(state, "_fc.weight", 0), "channels": dimension(state, "_conv_stem.weight", 1)}


# For images of side 224, 240 and 260, given as (255 x - 127) / 128
efficientnet_lite0 = architecture(_read_lite, name="efficientnet_lite0")(partial(EfficientNetLite, 1.0, 1.0))
efficientnet_lite1 = architecture(_read_lite, name="efficientnet_lite1")(partial(EfficientNetLite, 1.0, 1.1))
efficientnet_lite2 = architecture(_read_lite, name="efficientnet_lite2")(partial(EfficientNetLite, 1.1, 1.2))
