"""Optimisers by name, and how the learning rate goes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

Schedule = Literal["one_cycle", "cosine", "steps", "constant"]


def optimiser_of(
    parameters: Iterable[Tensor],
    name: str,
    rate: float,
    decay: float,
    momentum: float,
    *,
    fused: bool | None = None,
    capturable: bool = False,
) -> Optimizer:
    """`capturable`: its step can be recorded into a CUDA graph, the rate being a tensor that schedules write to."""
    trained = list(parameters)
    own = torch.tensor(rate, device=trained[0].device) if capturable else rate
    if name == "adam":
        made: Optimizer = torch.optim.AdamW(trained, own, weight_decay=decay, fused=fused, capturable=capturable)
    elif name == "sgd":
        made = torch.optim.SGD(trained, own, momentum, weight_decay=decay, nesterov=momentum > 0, fused=fused)
    else:
        raise ValueError(f"no optimiser is called {name!r}; there are 'adam' and 'sgd'")
    for group in made.param_groups:
        group["initial_lr"] = rate  # a number: schedules would wait for a GPU to read a tensor
    return made


def schedule_of(stepper: Optimizer, name: str, rate: float, steps: int, warmup: int = 0) -> LRScheduler:
    """The rate of each of so many steps; `warmup`: in the first so many it rises to `rate` in equal parts."""
    if not 0 <= warmup < max(steps, 1):
        raise ValueError(f"a warm-up of {warmup} steps does not fit into {steps} steps of training")
    if name == "one_cycle":
        if warmup:
            raise ValueError("the one-cycle schedule has a rise of its own: warmup is for 'cosine' and 'constant'")
        # The cycle would give plain SGD a momentum.
        plain = any(group.get("momentum") == 0 for group in stepper.param_groups)
        return OneCycleLR(stepper, rate, total_steps=steps, cycle_momentum=not plain)
    if name not in ("cosine", "steps", "constant"):
        raise ValueError(f"no schedule is called {name!r}; there are 'one_cycle', 'cosine', 'steps' and 'constant'")

    def part(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if name == "cosine":
            return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        # A tenth from the middle on and a hundredth in the last quarter, as residual networks are trained on CIFAR.
        return 0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps)) if name == "steps" else 1.0

    return LambdaLR(stepper, part)


def rates_of(name: str, rate: float, steps: int, warmup: int = 0, *, momentum: float = 0.0) -> Tensor:
    """The rate of every step, for a training that cannot ask its schedule in between."""
    if name == "one_cycle" and momentum > 0:
        raise ValueError(
            "the one-cycle schedule moves the momentum too, which recorded steps cannot: take 'cosine' or 'constant'"
        )
    stepper = torch.optim.SGD([torch.zeros(1, requires_grad=True)], rate)
    plan = schedule_of(stepper, name, rate, steps, warmup)
    found = torch.empty(steps)
    stepper.step()  # schedules want the optimiser to go first
    for step in range(steps):
        found[step] = stepper.param_groups[0]["lr"]
        if step + 1 < steps:
            plan.step()
    return found
