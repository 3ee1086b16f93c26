"""A small network, its training, and the check that masks held."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sosie.train import Masks


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(8 * 6 * 6, 10),
    )  # fmt: skip


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x, y = batch(step)
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()


def assert_held(masks: Masks, optimiser: torch.optim.Optimizer | None = None) -> None:
    """Weights, and all that the optimiser remembers of them, are 0 where masked and nowhere else."""
    for layer, mask in masks.items():
        weight = masks.weight(layer)
        assert torch.equal(weight[~mask], torch.zeros_like(weight[~mask]))
        assert (weight[mask] != 0).all()
        for name, kept in (optimiser.state[weight] if optimiser else {}).items():
            if kept is not None and kept.shape == weight.shape:
                assert torch.equal(kept[~mask], torch.zeros_like(kept[~mask])), (layer, name)
                assert (kept[mask] != 0).all(), (layer, name)
