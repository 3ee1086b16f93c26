"""Small networks with every kind of connection that matching must follow."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sosie.models import cifar_resnet, tiny10
from sosie.weights.axes import WeightAxes, leaves


def members_of(axes: WeightAxes, group: str) -> list[tuple[str, int]]:
    """The axes that hold a group, as names of tensors and numbers of axes."""
    wanted = axes.groups[group]
    return [(name, i) for name, own in axes.of.items() for i, axis in enumerate(own) if wanted in leaves(axis)]


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, batch norms and running statistics, so that all neurons differ."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point():
                continue
            fan = tensor[0].numel() if tensor.ndim > 1 else 4
            tensor.copy_(torch.randn(tensor.shape, generator=random) / fan**0.5)
            if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
                tensor.abs_().add_(0.5)
    return model.eval()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(9, 16),
        nn.ReLU(),
        nn.Linear(16, 12),
        nn.LeakyReLU(0.1),
        nn.Linear(12, 14),
        nn.Tanh(),
        nn.Linear(14, 4),
    )


def vgg_like() -> nn.Module:
    """Batch norm, pooling, and a flatten that spreads each channel over 16 places."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 10, 3, padding=1), nn.BatchNorm2d(10), nn.LeakyReLU(0.2, inplace=True), nn.AvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(160, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 5)),
    )


def depthwise() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 6, 1)),
        *(nn.GroupNorm(3, 6), nn.PReLU(6), nn.Conv2d(6, 6, 3, groups=3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(6, 4),
    )


class Shared(nn.Module):
    """One layer used twice: its axes in and out are then the same group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(2):
            x = torch.relu(self.again(x))
        return self.last(x)


class Branches(nn.Module):
    """Concatenated branches, a chunk of them, and an in-place sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.join, self.head = nn.Conv2d(14, 8, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        right = self.right(x)
        joined = self.join(functional.relu(torch.cat([self.left(x), right], 1)))
        joined += right
        gate, value = joined.chunk(2, dim=1)
        return self.head((torch.sigmoid(gate) * value).mean((2, 3)))


class WrittenInto(nn.Module):
    """Writes channels into a part of another tensor, which is not followed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(6, 5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.new_zeros(len(x), 6, *x.shape[2:])
        wide[:, :4] = self.first(x)
        return self.head(torch.relu(self.second(wide)).mean((2, 3)))


class Sorted(nn.Module):
    """Sorts its neurons: their order cannot be changed, though no rule says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(self.first(x).sort(dim=1).values)))


NETS = {
    "mlp": mlp,
    "vgg with batch norm": vgg_like,
    "depthwise": depthwise,
    "branches": Branches,
    "tiny10": lambda: tiny10(width=0.5),
    "resnet20 with convolutions as shortcuts": lambda: cifar_resnet(20, shortcut="B", width=0.5),
    "resnet8 with zeros as shortcuts": lambda: cifar_resnet(8, shortcut="A", width=0.5),
}
