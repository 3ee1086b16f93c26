"""Last layers: found, given features once, and fitted anew for many networks at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .adversarial import Prepare, floats
from .loop import Schedule, optimiser_of, schedule_of, shuffled


def find_head(model: nn.Module, name: str | None = None) -> str:
    """The name of the last linear layer, or of the one that is named."""
    linear = [each for each, module in model.named_modules() if isinstance(module, nn.Linear)]
    if name is None and linear:
        return linear[-1]
    if name is None or name not in linear:
        asked = "the model has no linear layer" if name is None else f"no linear layer is called {name!r}"
        raise ValueError(f"{asked}; there are {', '.join(linear) or 'none'}: head= names the one that answers")
    return name


@torch.no_grad()
def features(
    model: nn.Module, images: Tensor, *, head: str | None = None, prepare: Prepare | None = None, batch: int = 500
) -> Tensor:
    """What reaches the last layer, (images, features), with the model in evaluation mode."""
    layer = model.get_submodule(find_head(model, head))
    found: list[Tensor] = []
    answers: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], answer: Tensor) -> None:
        found.append(args[0].detach())
        answers.append(answer)

    handle = layer.register_forward_hook(keep)
    try:
        with evaluating(model):
            for part in images.split(batch):
                x = floats(part)
                answer = model(x if prepare is None else prepare(x))
                if len(answers) == 1:
                    _check_answer(answer, answers[0], find_head(model, head))
            if len(answers) != len(images.split(batch)):
                raise ValueError(f"{find_head(model, head)!r} was called {len(answers)} times, not once a batch")
    finally:
        handle.remove()
    return torch.cat(found)


def _check_answer(answer: Tensor, of_head: Tensor, name: str) -> None:
    if answer.shape != of_head.shape or not torch.equal(answer, of_head):
        raise ValueError(f"the model answers something else than its linear layer {name!r}: head= names the one")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards each in its own again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


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
    epochs: int = 100,
    seed: int = 0,
    batch: int = 50,
    rate: float = 1e-3,
    optimiser: Literal["adam", "sgd"] = "adam",
    momentum: float = 0.9,
    decay: float = 0.0,
    schedule: Schedule = "one_cycle",
) -> Heads:
    """A linear layer for each of many sets of features, by cross-entropy from zero; each as if it were alone.

    features (heads, rows, features) with labels (heads, rows), or (rows,) where all have the same. All heads see the
    rows in one order, which comes from `seed`.
    """
    if features.ndim != 3 or labels.shape not in (features.shape[:2], features.shape[1:2]):
        raise ValueError(
            "need features (heads, rows, features) and labels (heads, rows) or (rows,), got "
            f"{tuple(features.shape)} and {tuple(labels.shape)}"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"labels from {int(labels.min())} to {int(labels.max())} are not of {classes} classes")
    count, rows, width = features.shape
    labels = labels.expand(count, rows)
    heads = Heads(
        features.new_zeros(count, classes, width).requires_grad_(), features.new_zeros(count, classes).requires_grad_()
    )
    stepper = optimiser_of([heads.weight, heads.bias], optimiser, rate, decay, momentum)
    plan = schedule_of(stepper, schedule, rate, epochs * -(-rows // batch))
    for index in shuffled(rows, epochs, batch, seed, features.device):
        logits = heads(features[:, index])
        # The sum over heads: none sees the others.
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, index].flatten(), reduction="sum") / len(index)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        plan.step()
    return Heads(heads.weight.detach(), heads.bias.detach())


def nearest_members(similarity: Tensor, count: int) -> Tensor:
    """(N, count): for each of N models the most similar others, nearest first, from similarities (N, N)."""
    size = len(similarity)
    if similarity.shape != (size, size) or not 1 <= count < size:
        raise ValueError(f"{count} members cannot be chosen from similarities {tuple(similarity.shape)} (N, N)")
    own = torch.eye(size, dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(own, -torch.inf).topk(count, dim=1).indices
