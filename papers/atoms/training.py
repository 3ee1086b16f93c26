"""Many networks trained at once, each on images of its own, as one function of stacked parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from data import Lessons, Pool, Prepare
from networks import State, by_products, sites_of, stacked
from settings import Recipe, Settings
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

Penalty = Callable[[list[Tensor]], Tensor]  # activations of one network (n, c, h, w) at its sites → penalties (k,)


def train(
    settings: Settings,
    models: Sequence[nn.Module],
    images: Pool,
    lessons: Lessons,
    recipe: Recipe,
    *,
    seed: int,
    keep: Iterable[int] = (),
    penalty: Penalty | None = None,
    weights: Tensor | None = None,
) -> dict[int, State]:
    """The stacked networks after the epochs in `keep`, and after the last; 0 is before.

    Network k goes through its own images in its own order, which comes from `seed` and k alone. Only what requires
    gradients moves. `weights` (networks, k): how much of each penalty is added to each network's loss.
    """
    if len(models) != len(lessons.index):
        raise ValueError(f"{len(models)} networks, but lessons for {len(lessons.index)}")
    whole = stacked(models)
    trained = {name for name, p in models[0].named_parameters() if p.requires_grad}
    moving = {name: whole[name].clone().requires_grad_() for name in trained}
    fixed = {name: x for name, x in whole.items() if name not in trained}
    answer = Answer(models[0], settings, penalty)
    stepper = torch.optim.SGD(moving.values(), recipe.rate, recipe.momentum, fused=True)
    kept, found = {*keep, recipe.epochs}, {}
    count = lessons.index.shape[1]
    steps = max(1, count // recipe.batch)  # what is left over of an epoch is not seen in it
    for epoch in range(recipe.epochs + 1):
        if epoch in kept:
            found[epoch] = {name: moving[name].detach().clone() if name in moving else x for name, x in whole.items()}
        if epoch == recipe.epochs:
            break
        order = orders(len(models), count, seed, epoch).to(lessons.index.device)
        for chosen in order[:, : steps * recipe.batch].chunk(steps, 1):
            x, y = (side.gather(1, chosen) for side in (lessons.index, lessons.labels))
            logits, extra = answer(moving, fixed, images.images[x])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum") / y.shape[1]
            if weights is not None:
                loss = loss + (extra * weights).sum()
            stepper.zero_grad()
            loss.backward()
            stepper.step()
    check_finite(found[recipe.epochs], trained)
    return found


def orders(networks: int, count: int, seed: int, epoch: int) -> Tensor:
    """A new order of the images for every network, (networks, count); the same on every device."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.rand(networks, count, generator=generator).argsort(1)


class Answer:
    """All networks as one function; computes in bfloat16 where the settings say so."""

    def __init__(self, model: nn.Module, settings: Settings, penalty: Penalty | None = None) -> None:
        self.template = by_products(copy.deepcopy(model)).to("meta")
        self.prepare, self.penalty = Prepare(settings.device), penalty
        self.dtype = torch.bfloat16 if settings.mixed else torch.float32
        self.seen: list[Tensor] = []
        if penalty is not None:
            for site in sites_of(self.template).values():
                self.template.get_submodule(site).register_forward_hook(self._look)

    def _look(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.seen.append(output)

    def __call__(self, moving: State, fixed: State, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (networks, n, classes) and penalties (networks, k) for images (networks, n, …)."""
        return vmap(self._one)(moving, fixed, self.prepare(images).to(self.dtype))

    def _one(self, moving: State, fixed: State, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen = []
        state = {name: value.to(self.dtype) for name, value in (moving | fixed).items()}
        logits = functional_call(self.template, state, (x,))
        return logits, logits.new_zeros(1) if self.penalty is None else self.penalty(self.seen)


@torch.no_grad()
def accuracies(
    settings: Settings, model: nn.Module, state: State, images: Pool, lessons: Lessons, batch: int = 100
) -> Tensor:
    """Share of its own images that each network names rightly, (networks,)."""
    answer = Answer(model, settings)
    right = torch.zeros(len(lessons.index), device=lessons.index.device)
    for index, labels in zip(lessons.index.split(batch, 1), lessons.labels.split(batch, 1), strict=True):
        logits, _ = answer(state, {}, images.images[index])
        right += (logits.argmax(2) == labels).sum(1)
    return (right / lessons.index.shape[1]).cpu()


def check_finite(state: State, names: Iterable[str]) -> None:
    for name in names:
        bad = ~torch.isfinite(state[name]).flatten(1).all(1)
        if bool(bad.any()):
            raise ValueError(f"{name} of network {int(bad.nonzero()[0])} is NaN or infinite: its rate was too high")
