"""What the tests of training share: small problems, a network of everything that has a state, masks that move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def images(count: int = 100) -> tuple[Tensor, Tensor]:
    """Bright spots left or right of the middle, as uint8."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 60, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    y = torch.arange(count) % 2
    x[y == 0, :, 2:6, 1:3] += 150
    x[y == 1, :, 2:6, 5:7] += 150
    return x, y


def network(seed: int = 0) -> nn.Sequential:
    """Running statistics, dropout, and a mask."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 2)
    )
    model[0].register_buffer("weight_mask", torch.ones_like(model[0].weight, dtype=torch.bool))
    with torch.no_grad():
        model[0].weight_mask[..., ::2] = False
        model[0].weight.mul_(model[0].weight_mask)
    return model


class MovingMasks:
    """Which columns of the kernels are kept changes every third step, to the others: masks with a past."""

    def __init__(self, model: nn.Sequential, *, every: int = 3) -> None:
        self.layer, self.every, self.steps = model[0], every, 0

    @contextmanager
    def hold(self, optimiser: torch.optim.Optimizer) -> Iterator[None]:
        handles = [optimiser.register_step_pre_hook(self._before), optimiser.register_step_post_hook(self._after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _before(self, *_: Any) -> None:
        self.steps += 1
        if self.every and self.steps % self.every == 0:
            self.layer.weight_mask.logical_not_()
        self.layer.weight.grad.mul_(self.layer.weight_mask)

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        self.layer.weight.mul_(self.layer.weight_mask)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def numbers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def energy(shown: dict[Any, Tensor]) -> Tensor:
    """A penalty: the mean squares of all activations."""
    return torch.stack([value.square().mean() for value in shown.values()]).sum()
