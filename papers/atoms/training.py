"""Many networks trained at once, each on images of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from data import Lessons, Pool, Prepare
from networks import State, sites_of
from settings import Recipe, Settings
from torch import Tensor, nn
from torch.nn import functional

from sosie.train.many_networks import Stack, stacked_state, without_numbers

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
    stack, prepare = (
        Stack(template(models[0], penalty), stacked_state(models)),
        Prepare(settings),
    )
    stepper = torch.optim.SGD(stack.trained.values(), recipe.rate, recipe.momentum, fused=True)
    kept, found = {*keep, recipe.epochs}, {}
    count = lessons.index.shape[1]
    steps = max(1, count // recipe.batch)  # what is left over of an epoch is not seen in it
    extra = 0 if weights is None else weights.shape[1]
    for epoch in range(recipe.epochs + 1):
        if epoch in kept:
            found[epoch] = {name: value.clone() for name, value in stack.state().items()}
        if epoch == recipe.epochs:
            break
        order = orders(len(models), count, seed, epoch).to(lessons.index.device)
        for chosen in order[:, : steps * recipe.batch].split(recipe.batch, 1):
            x, y = (side.gather(1, chosen) for side in (lessons.index, lessons.labels))
            answer = stack(prepare(images.images[x]))
            logits = answer[..., : answer.shape[-1] - extra].flatten(0, 1)
            loss = functional.cross_entropy(logits, y.flatten(), reduction="sum") / y.shape[1]
            if weights is not None:
                loss = loss + (answer[:, 0, -extra:] * weights).sum()
            stepper.zero_grad()
            loss.backward()
            if recipe.clip is not None:
                clip(stack.trained.values(), recipe.clip)
            stepper.step()
    check_finite(found[recipe.epochs], stack.trained)
    return found


def clip(stacked: Iterable[Tensor], length: float) -> None:
    """Shorten the gradient of every network to at most this length; each is one network's own."""
    grads = [x.grad for x in stacked if x.grad is not None]
    norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
    share = (length / norms).clamp(max=1)
    for grad in grads:
        grad.mul_(share.view(-1, *[1] * (grad.ndim - 1)))


def template(model: nn.Module, penalty: Penalty | None = None) -> nn.Module:
    """The code of a network; with a penalty, its penalties are further columns of the answer."""
    code = without_numbers(model)
    if penalty is not None:
        seen: list[Tensor] = []

        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen.append(output)

        def append(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
            found = penalty(seen)
            seen.clear()
            return torch.cat([logits.float(), found.expand(len(logits), -1)], 1)

        for site in sites_of(code).values():
            code.get_submodule(site).register_forward_hook(look)
        code.register_forward_hook(append)
    return code


def orders(networks: int, count: int, seed: int, epoch: int) -> Tensor:
    """A new order of the images for every network, (networks, count); the same on every device."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.rand(networks, count, generator=generator).argsort(1)


@torch.no_grad()
def accuracies(
    settings: Settings, model: nn.Module, state: State, images: Pool, lessons: Lessons, batch: int = 100
) -> Tensor:
    """Share of its own images that each network names rightly, (networks,)."""
    stack, prepare = Stack(template(model), state, trains=()), Prepare(settings)
    right = torch.zeros(len(lessons.index), device=lessons.index.device)
    for index, labels in zip(lessons.index.split(batch, 1), lessons.labels.split(batch, 1), strict=True):
        right += (stack(prepare(images.images[index])).argmax(2) == labels).sum(1)
    return (right / lessons.index.shape[1]).cpu()


def check_finite(state: State, names: Iterable[str]) -> None:
    for name in names:
        bad = ~torch.isfinite(state[name]).flatten(1).all(1)
        if bool(bad.any()):
            raise ValueError(f"{name} of network {int(bad.nonzero()[0])} is NaN or infinite: its rate was too high")
