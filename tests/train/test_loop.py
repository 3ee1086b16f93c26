"""The training loop learns, and repeats itself under one seed."""

from __future__ import annotations

import torch
from torch import nn

from sosie.train import accuracy, fit


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))


def test_it_learns_and_repeats() -> None:
    x, y = problem()
    untrained = accuracy(network(), x, y)
    models = [fit(network(), x, y, epochs=30, seed=1) for _ in range(2)]
    assert accuracy(models[0], x, y) > max(0.9, untrained + 0.2)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    other = fit(network(), x, y, epochs=30, seed=2)
    assert any(not torch.equal(a, b) for a, b in zip(models[0].parameters(), other.parameters(), strict=True))
    assert not models[0].training
