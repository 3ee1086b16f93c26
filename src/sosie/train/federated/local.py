"""What clients do by themselves: train on their own images, and answer on their own test images."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ...data.draws import derived
from ..adversarial import Prepare, floats
from ..schedules import optimiser_of
from ..stack import Stack, State, orders
from .clients import Clients

TESTED_AT_ONCE = 5000  # images in one forward pass


@dataclass(frozen=True, eq=False)
class Local:
    """Clients, their code, and how they train; `at_once` of them in one call."""

    clients: Clients
    template: nn.Module
    batch: int
    rate: float
    momentum: float
    decay: float
    optimiser: Literal["adam", "sgd"]
    prepare: Prepare | None
    mixed: bool
    at_once: int
    seed: int

    def train(
        self,
        who: Tensor,
        own: State,
        shared: State,
        *,
        trains: Collection[str],
        epochs: int,
        when: tuple[int, int],
        pull: float = 0.0,
    ) -> State:
        """What clients `who` have after so many epochs: all of `own` and what was trained, (clients, …).

        They start from `own` (clients, …) and, where that has nothing, from `shared`, towards which they are pulled.
        `when`: the numbers of the round and of the phase, from which the order of the images comes.
        """
        if not epochs:
            return own
        parts = []
        for group in self._groups(len(who)):
            members = {name: stacked[group] for name, stacked in own.items()}
            stack = Stack.of(self.template, members, shared, count=len(who[group]), trains=trains, mixed=self.mixed)
            self._learn(stack, who[group], epochs, when, (pull, shared) if pull else None)
            parts.append({**members, **stack.state()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]

    def _learn(
        self, stack: Stack, who: Tensor, epochs: int, when: tuple[int, int], pull: tuple[float, State] | None
    ) -> None:
        if not stack.trained:
            return
        images = self.clients.train[who]
        seeds = [order_seed(self.seed, *when, client) for client in who.tolist()]
        stepper = optimiser_of(stack.trained.values(), self.optimiser, self.rate, self.decay, self.momentum, fused=True)
        with _seeded(seeds[0], images.device):
            for index in orders(seeds, images.shape[1], epochs, self.batch, images.device):
                numbers = images.gather(1, index)
                stack.learn(self._inputs(numbers), self.clients.labels[numbers], stepper, pull)

    @torch.no_grad()
    def accuracy(self, own: State, shared: State) -> Tensor:
        """Of every client, on its own test images: (clients,)."""
        test = self.clients.test
        right = torch.zeros(len(test), device=test.device)
        for group in self._groups(len(test)):
            members = {name: stacked[group] for name, stacked in own.items()}
            stack = Stack.of(self.template, members, shared, count=len(test[group]), trains=())
            for numbers in test[group].split(max(1, TESTED_AT_ONCE // len(test[group])), dim=1):
                right[group] += (stack.answers(self._inputs(numbers)).argmax(2) == self.clients.labels[numbers]).sum(1)
        return right / test.shape[1]

    def _groups(self, count: int) -> list[slice]:
        return [slice(start, start + self.at_once) for start in range(0, count, self.at_once)]

    def _inputs(self, numbers: Tensor) -> Tensor:
        """Images (clients, n, …) as the networks take them."""
        x = floats(self.clients.images[numbers.flatten()])
        x = self.prepare(x) if self.prepare else x
        return x.unflatten(0, numbers.shape)


def order_seed(seed: int, turn: int, phase: int, client: int) -> int:
    """The seed from which the order of a client's images comes, as `fit` takes it."""
    return int(derived(derived(derived(seed, turn), phase), client))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout draws from torch's own generators: seeded for a while, then left as found."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
