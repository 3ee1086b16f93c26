"""Masks that change while a network trains: small weights are dropped, as many others grow (RigL, SET)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .masks import Masks, before_update

Growth = Literal["gradient", "random"]


class Regrow:
    """Now and then drops a layer's smallest weights and grows as many: `with RigL(masks, steps).hold(optimiser)`.

    `how`: those with the largest gradient grow ("gradient": RigL, Evci et al. 2020) or random ones ("random": SET,
    Mocanu et al. 2018). At every `every`-th of the optimiser's `steps`, before `until` × steps, the share
    `fraction` / 2 × (1 + cos(π step / (until × steps))) of a layer's kept weights is dropped, rounded down, and as many
    of those that are not kept grow; one that was dropped may grow back, and then keeps its weight. So a layer's density
    never changes. The step of an update trains the weights that stay; new ones are 0 after it, with no momentum, and
    train from the next step on. An update whose gradients are not all finite is left out.

    It is used wherever masks are (`hold`, `fit(…, masks=)`); the masks themselves must not be held beside it.
    """

    def __init__(
        self,
        masks: Masks,
        steps: int,
        *,
        how: Growth = "gradient",
        every: int = 100,
        fraction: float = 0.3,
        until: float = 0.75,
        seed: int = 0,
    ) -> None:
        if how not in ("gradient", "random"):
            raise ValueError(f"how={how!r}: 'gradient' (RigL) or 'random' (SET)")
        for name, value in (("steps", steps), ("every", every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number of optimiser steps, from 1 on")
        if not 0 < fraction < 1:
            raise ValueError(f"fraction={fraction!r}: the share of kept weights the first update changes, in (0, 1)")
        if not 0 < until <= 1:
            raise ValueError(f"until={until!r}: the share of the steps in which masks change, above 0 and up to 1")
        self.masks, self.steps, self.how, self.every = masks, steps, how, every
        self.fraction, self.until, self.seed = fraction, until, seed
        self.step = 0  # of the optimiser, so far
        self.last: list[dict[str, Any]] = []  # of the last update: layer, dropped, and how many of the grown are new

    @property
    def due(self) -> bool:
        """Whether the next step changes the masks: such a step cannot be recorded in a CUDA graph."""
        step = self.step + 1
        return step % self.every == 0 and step < self.until * self.steps

    def fraction_at(self, step: int) -> float:
        """The share of kept weights that an update at this step drops."""
        return self.fraction / 2 * (1 + math.cos(math.pi * step / (self.until * self.steps)))

    @contextmanager
    def hold(self, optimiser: torch.optim.Optimizer) -> Iterator[Regrow]:
        """As `Masks.hold`, and the masks change when an update is due."""
        first = before_update(optimiser, partial(self._before_step, optimiser))  # before gradients are masked
        try:
            with self.masks.hold(optimiser):
                yield self
        finally:
            first.remove()

    def settings(self) -> dict[str, Any]:
        """What was asked for, as far as a checkpoint can compare it."""
        kept = ("steps", "how", "every", "fraction", "until", "seed")
        return {name: getattr(self, name) for name in kept}

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint needs beside the model, which has the masks."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step = int(state["step"])

    def __repr__(self) -> str:
        return f"<Regrow by {self.how} at step {self.step} of {self.steps}: {self.masks!r}>"

    def _before_step(self, optimiser: torch.optim.Optimizer) -> None:
        if self.due:
            self._update(optimiser)
        self.step += 1

    @torch.no_grad()
    def _update(self, optimiser: torch.optim.Optimizer) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "masks change in this step, which a CUDA graph cannot record: take steps that are `due` apart"
            )
        trained = {id(p) for group in optimiser.param_groups for p in group["params"] if p.grad is not None}
        layers = [layer for layer in self.masks if id(self.masks.weight(layer)) in trained]
        gradients = {layer: _gradient(self.masks.weight(layer)) for layer in layers}
        if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            return
        entropy = np.random.SeedSequence([self.seed, self.step]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(entropy))
        share = self.fraction_at(self.step + 1)
        self.last = []
        for layer, gradient in gradients.items():
            score = gradient.abs() if self.how == "gradient" else _random(gradient, generator)
            self._change(layer, share, score)
        self.masks.clear(optimiser)

    def _change(self, layer: str, share: float, score: Tensor) -> None:
        mask, weight = self.masks[layer], self.masks.weight(layer)
        before = mask.flatten().clone()  # the mask itself is about to change
        count = math.floor(share * int(before.sum()))
        dropped = weight.abs().flatten().masked_fill(~before, math.inf).topk(count, largest=False).indices
        after = before.index_fill(0, dropped, False)
        grown = score.flatten().masked_fill(after, -1).topk(count).indices
        after = after.index_fill(0, grown, True)
        _gradient(weight).mul_(mask)  # what is new waits for the next step
        self.masks.set(layer, after.view(mask.shape))
        self.last.append({"layer": layer, "dropped": count, "new": int((after & ~before).sum())})


RigL = partial(Regrow, how="gradient")
SET = partial(Regrow, how="random")


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU: the same on every device."""
    return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.device)
