"""Many small networks of one architecture trained at once, each as if it were alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional

from ..data.attacks import Attack, open_attack
from ..data.draws import derived
from ..progress import track
from .adversarial import floats
from .loop import Schedule, optimiser_of, schedule_of, shuffled

State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Networks of one architecture at one epoch: every parameter and buffer stacked, (networks, …)."""

    epoch: int
    seeds: tuple[int, ...]
    state: State
    template: nn.Module = field(repr=False)

    def __len__(self) -> int:
        return len(self.seeds)

    def model(self, k: int) -> nn.Module:
        """Network k as a module of its own, in evaluation mode."""
        if not -len(self) <= k < len(self):
            raise IndexError(f"network {k} of {len(self)}")
        model = copy.deepcopy(self.template)
        model.load_state_dict({name: stacked[k] for name, stacked in self.state.items()})
        return model.eval()

    def models(self) -> list[nn.Module]:
        return [self.model(k) for k in range(len(self))]

    def __call__(self, x: Tensor) -> Tensor:
        """What every network answers: (networks, n, …), to inputs (networks, n, …), each network to its own."""
        return vmap(lambda state, own: functional_call(self.template, state, (own,)))(self.state, x)

    @torch.no_grad()
    def outputs(self, images: Tensor, *, batch: int = 1000) -> Tensor:
        """What every network answers to the same images: (networks, n, …)."""
        answer = vmap(lambda state, x: functional_call(self.template, state, (x,)), in_dims=(0, None))
        return torch.cat([answer(self.state, floats(part)) for part in images.split(batch)], dim=1)


def fit_together(
    make: Callable[[], nn.Module],
    count: int,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    seeds: Sequence[int] | None = None,
    strategy: str | Attack = "standard",
    keep: Iterable[int] | None = None,
    batch: int = 64,
    rate: float = 1e-3,
    optimiser: Literal["adam", "sgd"] = "adam",
    momentum: float = 0.9,
    decay: float = 0.0,
    schedule: Schedule = "constant",
    task: str = "training together",
) -> list[Checkpoint]:
    """Train `count` networks at once, each on its own order of the images; the checkpoints after the epochs in `keep`.

    Network k is `make()` under the global seed seeds[k] (0, 1, 2 … if None) and is trained as `fit` with that seed
    trains it, to rounding. `strategy`: "standard", or an attack ("fgsm", "fast_fgsm", "pgd(epsilon=0.1)") that changes
    every batch before its step, on the network as it is then (the clean images are not shown). `keep`: None keeps the
    last epoch; 0 is before training. Images are floats as the networks take them, or uint8, which become [0, 1]; the
    networks are trained where the images are. Networks that draw random numbers themselves (dropout) are refused.
    """
    kept = _epochs_to_keep(keep, epochs)
    own_seeds = tuple(range(count)) if seeds is None else tuple(seeds)
    if len(own_seeds) != count or count < 1:
        raise ValueError(f"need one seed a network: {count} networks, {len(own_seeds)} seeds")
    if len(images) != len(labels):
        raise ValueError(f"need one label an image, got {len(images)} images and {len(labels)} labels")
    attacker = None if strategy == "standard" else open_attack(strategy)
    networks = _Stack.of(make, own_seeds, images.device)
    stepper = optimiser_of(networks.parameters.values(), optimiser, rate, decay, momentum)
    per_epoch = -(-len(images) // batch)
    plan = schedule_of(stepper, schedule, rate, epochs * per_epoch)
    found = [networks.checkpoint(0)] if 0 in kept else []
    orders = [shuffled(len(images), epochs, batch, seed, images.device) for seed in own_seeds]
    for step in track(range(epochs * per_epoch), task, epochs * per_epoch, "steps"):
        index = torch.stack([next(order) for order in orders])
        x, y = floats(images[index]), labels[index]
        if attacker is not None:
            x = networks.attacked(attacker, x, y, index, step)
        loss = functional.cross_entropy(networks(x).flatten(0, 1), y.flatten(), reduction="sum") / index.shape[1]
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        plan.step()
        if (step + 1) % per_epoch == 0 and (step + 1) // per_epoch in kept:
            found.append(networks.checkpoint((step + 1) // per_epoch))
    return found


@dataclass(eq=False)
class _Stack:
    """Networks as one function of stacked parameters; `template` is the code, and holds no numbers."""

    template: nn.Module
    own: nn.Module  # one of the networks, for checkpoints: its numbers are replaced
    seeds: tuple[int, ...]
    parameters: State
    buffers: State

    @staticmethod
    def of(make: Callable[[], nn.Module], seeds: tuple[int, ...], device: torch.device) -> _Stack:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            models = [_made(make, seed).to(device).train() for seed in seeds]
        parameters, buffers = stack_module_state(models)
        return _Stack(copy.deepcopy(models[0]).to("meta"), models[0].eval(), seeds, parameters, buffers)

    def __call__(self, x: Tensor) -> Tensor:
        answer = vmap(lambda p, b, own: functional_call(self.template, (p, b), (own,)))
        try:
            return answer(self.parameters, self.buffers, x)
        except RuntimeError as error:
            error.add_note("networks trained together must not draw random numbers, and must answer by tensors alone")
            raise

    def attacked(self, attack: Attack, x: Tensor, y: Tensor, index: Tensor, step: int) -> Tensor:
        seeds = torch.stack([derived(seed, step) for seed in self.seeds])[:, None]
        with _evaluating(self.template):
            return attack(self, x, y, seed=seeds, index=index)

    def checkpoint(self, epoch: int) -> Checkpoint:
        both = itertools.chain(self.parameters.items(), self.buffers.items())
        state = {name: stacked.detach().clone() for name, stacked in both}
        return Checkpoint(epoch, self.seeds, state, self.own)


def _made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


@contextmanager
def _evaluating(template: nn.Module) -> Iterator[None]:
    template.eval()
    try:
        yield
    finally:
        template.train()


def _epochs_to_keep(keep: Iterable[int] | None, epochs: int) -> set[int]:
    kept = {epochs} if keep is None else set(keep)
    if wrong := sorted(epoch for epoch in kept if not 0 <= epoch <= epochs):
        raise ValueError(f"keep names epoch {wrong[0]}, but there are epochs 0 (before training) to {epochs}")
    return kept
