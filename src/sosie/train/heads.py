"""Last layers: find them, compute their inputs, and fit them again for many networks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.restore import evaluating
from ..checks import nearest
from ..stats import check_labels
from .many_networks import Stack, orders
from .recipe import Prepare, Recipe, floats

RECIPE = Recipe(epochs=100, batch=50, rate=1e-3)


def find_head(model: nn.Module, name: str | None = None) -> str:
    """The name of the last linear layer, or `name` if that is a linear layer."""
    linear = [layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("the model has no linear layer to be its head: head= names its last layer")
    if name is None:
        return linear[-1]
    if name not in linear:
        raise ValueError(f"no linear layer is called {name!r}{nearest(name, linear)}")
    return name


@torch.no_grad()
def features(
    model: nn.Module, images: Tensor, *, head: str | None = None, prepare: Prepare | None = None, batch: int = 500
) -> Tensor:
    """The inputs of the last layer, (images, features), with the model in evaluation mode."""
    name = find_head(model, head)
    inputs: list[Tensor] = []
    answers: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], answer: Tensor) -> None:
        inputs.append(args[0].detach())
        answers.append(answer)

    handle = model.get_submodule(name).register_forward_hook(keep)
    parts = images.split(batch)
    try:
        with evaluating(model):
            for part in parts:
                answer = model(floats(part, prepare))
                if len(answers) == 1 and not (answer.shape == answers[0].shape and torch.equal(answer, answers[0])):
                    raise ValueError(f"the model's answer is not that of {name!r}: head= names its last linear layer")
    finally:
        handle.remove()
    if len(answers) != len(parts):
        raise ValueError(f"{name!r} was called {len(answers)} times in {len(parts)} batches, not once in each")
    return torch.cat(inputs)


@dataclass(frozen=True, eq=False)
class Heads:
    """Last layers of many networks: weight (heads, classes, features), bias (heads, classes)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Logits (heads, rows, classes) of features (heads, rows, features)."""
        return torch.baddbmm(self.bias[:, None], features, self.weight.mT)


def refit_head(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    recipe: Recipe = RECIPE,
    start: Heads | None = None,
    seed: int | Sequence[int] = 0,
) -> Heads:
    """Fit a linear layer by cross-entropy to each of many sets of features, each as if alone.

    features (heads, rows, features) with labels (heads, rows), or (rows,) for all. Heads start from zero, or from
    `start`. `seed` gives the order of the rows: one for all heads, or a list with one for each.
    """
    recipe.refuse("refit_head", "clip", "average", "attack", "augment", "prepare", "mixed", "compiled")
    if features.ndim != 3 or labels.shape not in (features.shape[:2], features.shape[1:2]):
        raise ValueError(
            "need features (heads, rows, features) and labels (heads, rows) or (rows,), got "
            f"{tuple(features.shape)} and {tuple(labels.shape)}"
        )
    check_labels(labels.flatten(), "labels", classes)
    count, rows, width = features.shape
    labels = labels.expand(count, rows)
    if start is None:
        start = Heads(features.new_zeros(count, classes, width), features.new_zeros(count, classes))
    stack = Stack(nn.Linear(width, classes, device="meta"), vars(start))
    optimiser = recipe.make_optimiser(stack.trained.values())
    schedule = recipe.make_schedule(optimiser, recipe.steps(rows))
    seeds = [seed] if isinstance(seed, int) else list(seed)
    head = torch.arange(count, device=features.device)[:, None]
    for index in orders(seeds, rows, recipe.epochs, recipe.batch, features.device):  # (1 or heads, batch)
        stack.learn(features[head, index], labels[head, index], optimiser)
        schedule.step()
    return Heads(**stack.state())
