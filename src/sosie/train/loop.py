"""A short loop that trains an image classifier on data held in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..progress import track


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    seed: int,
    batch: int = 64,
    rate: float = 5e-3,
    task: str = "training",
) -> nn.Module:
    """Train with Adam and a one-cycle rate; the order of the images comes from `seed` alone."""
    order = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(images) // batch)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=rate, total_steps=steps)
    shuffled = (index for _ in range(epochs) for index in torch.randperm(len(images), generator=order).split(batch))
    model.train()
    for index in track(shuffled, task, steps, "steps"):
        loss = functional.cross_entropy(model(images[index]), labels[index])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, *, batch: int = 500) -> float:
    """Share of images whose largest output is their label."""
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(batch), labels.split(batch), strict=True)
    )
    return right / len(images)
