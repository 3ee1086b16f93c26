"""Optimisers by name, and how the learning rate goes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

Schedule = Literal["one_cycle", "cosine", "constant"]


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
    if name not in ("cosine", "constant"):
        raise ValueError(f"no schedule is called {name!r}; there are 'one_cycle', 'cosine' and 'constant'")
    falls = name == "cosine"

    def part(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2 if falls else 1.0

    return LambdaLR(stepper, part)
