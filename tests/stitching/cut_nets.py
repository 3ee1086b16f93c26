"""Small models that are easy or hard to cut in two."""

from __future__ import annotations

import torch
from stand_ins import ModelOutput
from torch import nn


class UNet(nn.Module):
    """One skip connection over the bottom; `join` adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
        self.up, self.join = nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skip = torch.relu(self.down(x))
        return self.head(torch.relu(self.join(torch.cat([skip, self.up(self.bottom(skip))], 1))))


class Remembers(nn.Module):
    """A skip connection through an attribute, which no graph of calls shows."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.middle, self.high = Keeps(self), nn.Linear(4, 4), Adds(self)
        self.kept: list[torch.Tensor] = []

    def forward(self, x):
        return self.high(self.middle(self.low(x)))


class Keeps(nn.Module):
    def __init__(self, owner) -> None:
        super().__init__()
        self.owner, self.linear = [owner], nn.Linear(4, 4)

    def forward(self, x):
        self.owner[0].kept = [self.linear(x)]
        return torch.tanh(self.owner[0].kept[0])


class Adds(nn.Module):
    def __init__(self, owner) -> None:
        super().__init__()
        self.owner, self.linear = [owner], nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x + self.owner[0].kept[0])


class Branches(nn.Module):
    """Branches on values: below the site ("low"), or above it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.low, self.site, self.a, self.b = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        h = torch.tanh(self.low(x))
        y = self.site(h)
        decides = x[:, 0] if self.where == "low" else y
        return self.a(y) if decides.sum() > 0 else self.b(y)


class BatchSize(nn.Module):
    """Remembers from the start how many inputs there are, in each of the usual ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv, self.fc = how, nn.Conv2d(3, 2, 3), nn.Linear(72, 2)

    def forward(self, x):
        n = {"shape": lambda: x.shape[0], "size": lambda: x.size(0), "len": lambda: len(x)}[self.how]()
        if self.how == "size":
            n, _, _, _ = x.size()
        return self.fc(self.conv(x).view(n, -1))


class InPlace(nn.Module):
    """Continues in place after `fc`, so that only the side effect counts."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.relu, self.fc = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x):
        y = self.fc(torch.sigmoid(self.low(x)))
        self.relu(y)  # the return value is not used
        return y + 1


class Takes(nn.Module):
    """A dict and an option in, a tuple with an extra out of the site, a ModelOutput out of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.site, self.head = nn.Linear(4, 4), Pair(), nn.Linear(4, 2)

    def forward(self, batch, *, scale=1.0, shift=None):
        h, extra = self.site(self.low(batch["a"]) + batch["b"])
        h = h if shift is None else h + shift
        return ModelOutput(loss=None, logits=self.head(h) * scale, extra=extra)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (torch.tanh(self.linear(x)), None)


class WithBuffer(nn.Module):
    """The model itself holds a buffer and a parameter above the site."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.head(self.low(x) * self.gain + self.shift * 2)
