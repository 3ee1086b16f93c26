"""A small network and a few clients for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sosie.models import AtomConv2d
from sosie.train import Recipe
from sosie.train.federated import Clients
from sosie.train.many_networks import State


def make() -> nn.Module:
    return nn.Sequential(
        AtomConv2d(1, 3, 3, 4, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


def some_clients(count: int = 4, n: int = 12, t: int = 5, noise: float = 0.3) -> Clients:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(count * (n + t)) % 3
    images = torch.randn(len(labels), 1, 4, 4, generator=generator, dtype=torch.float64) * noise + labels.view(
        -1, 1, 1, 1
    )
    numbers = torch.arange(len(labels)).view(count, n + t)
    return Clients(images, labels, numbers[:, :n], numbers[:, n:], torch.arange(count) // 2)


RECIPE = Recipe(epochs=2, batch=5, rate=0.05, optimiser="sgd", schedule="constant")
WAY: dict[str, Any] = {"recipe": RECIPE, "rounds": 2, "share": 1.0, "seed": 4}


def started(seed: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def apart(a: State, b: State) -> float:
    assert set(a) == set(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
