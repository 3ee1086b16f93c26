"""Images that stay on the device as bytes, and their normalisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from settings import Settings
from torch import Tensor

from sosie.data import open_images

CLASSES = {"cifar10": 10, "cifar100": 100}
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5075, 0.4867, 0.4411), (0.2673, 0.2565, 0.2762)),
}
SYNTHETIC = 32  # images of a smoke run


@lru_cache
def images(settings: Settings, name: str, split: str) -> tuple[Tensor, Tensor]:
    """(N, 3, 32, 32) as bytes, and labels."""
    if settings.synthetic:
        generator = torch.Generator().manual_seed(len(name + split))
        drawn = torch.randint(0, 256, (SYNTHETIC, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return drawn.to(settings.device), (torch.arange(SYNTHETIC) % CLASSES[name]).to(settings.device)
    found = open_images(name, split=split)
    assert found.labels is not None
    return found.images.to(settings.device), found.labels.to(settings.device)


@lru_cache
def prepare(settings: Settings, name: str) -> Callable[[Tensor], Tensor]:
    """[0, 1] to normalised; the constants are kept on the device, so that nothing waits for them."""
    mean, std = (torch.tensor(each, device=settings.device).view(3, 1, 1) for each in STATISTICS[name])
    return lambda x: (x - mean) / std


def probes(settings: Settings, name: str, count: int) -> Tensor:
    """The first test images, normalised."""
    found = images(settings, name, "test")[0][:count]
    if len(found) < count:
        raise ValueError(f"{name} has {len(found)} test images, {count} are asked for")
    return prepare(settings, name)(found.float() / 255)
