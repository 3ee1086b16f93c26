"""Small networks for the engine's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def mlp(seed: int = 0, width: int = 12, inputs: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(inplace=True), nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def cnn(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Flatten(),
        nn.Linear(6 * 36, 5),
    )


def inputs(n: int = 150, width: int = 8, seed: int = 9) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


class Tokens(nn.Module):
    """A transformer-like model that takes keyword arguments and returns a dict."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(20, 6)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(6, 2, 12, batch_first=True) for _ in range(2)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=attention_mask == 0)
        return {"last_hidden_state": hidden}


class Skips(nn.Module):
    """Keeps its skip connections in a list of its own, and clears that at the end of its forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.down, self.middle, self.up, self.last = nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(11, 7), nn.Linear(7, 3)
        self.skips: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.skips.append(torch.relu(self.down(x)))
        self.skips.append(torch.relu(self.middle(self.skips[-1])))
        x = self.last(torch.relu(self.up(torch.cat(self.skips[:2], 1))))
        self.skips.clear()
        self.calls += 1
        return x

    def by_hand(self, x: Tensor) -> dict[str, Tensor]:
        down = self.down(x)
        middle = self.middle(down.relu())
        return {"down": down, "middle": middle, "up": self.up(torch.cat([down.relu(), middle.relu()], 1))}
