"""Many small networks of one architecture trained at once, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..data.attacks import Attack, open_attack
from ..data.draws import derived
from ..progress import Progress
from .adversarial import floats
from .checks import check_data, check_epochs, check_types
from .schedules import Schedule, optimiser_of, schedule_of
from .stack import Stack, State, evaluating, made, network, orders, stacked_state, without_numbers

GROUP = 20


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Networks of one architecture at one epoch: every parameter and buffer stacked, (networks, …)."""

    epoch: int
    seeds: tuple[int, ...]
    state: State = field(repr=False)
    template: nn.Module = field(repr=False)

    def __len__(self) -> int:
        return len(self.seeds)

    def model(self, k: int) -> nn.Module:
        """Network k as a module of its own, in evaluation mode."""
        if not -len(self) <= k < len(self):
            raise IndexError(f"network {k} of {len(self)}")
        return network(self.template, self.state, k)

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
    at_once: int | None = None,
    task: str = "training together",
) -> list[Checkpoint]:
    """Train `count` networks at once, each on its own order of the images; the checkpoints after the epochs in `keep`.

    Network k is `make()` under the global seed seeds[k] (0, 1, 2 … if None) and is trained as `fit` with that seed
    trains it, to rounding. `strategy`: "standard", or an attack ("fgsm", "fast_fgsm", "pgd(epsilon=0.1)") that changes
    every batch before its step, on the network as it is then (the clean images are not shown). `keep`: None keeps the
    last epoch; 0 is before training. Images are floats as the networks take them, or uint8, which become [0, 1]; the
    networks are trained where the images are; `at_once` of them in one call (None: all, on a CPU 20, which its caches
    hold), without effect on the result. Networks that draw random numbers themselves (dropout) are refused.
    """
    check_epochs(epochs)
    check_data(images, labels, batch)
    kept = _epochs_to_keep(keep, epochs)
    own_seeds = tuple(range(count)) if seeds is None else tuple(seeds)
    if len(own_seeds) != count or count < 1:
        raise ValueError(f"need one seed a network: {count} networks, {len(own_seeds)} seeds")
    if len(images) != len(labels):
        raise ValueError(f"need one label an image, got {len(images)} images and {len(labels)} labels")
    attacker = None if strategy == "standard" else open_attack(strategy)
    size = at_once or (GROUP if images.device.type == "cpu" else count)
    groups = [own_seeds[start : start + size] for start in range(0, count, size)]
    steps = epochs * -(-len(images) // batch)
    found: list[list[Checkpoint]] = []
    with Progress(task, steps * len(groups), "steps") as bar:
        for group in groups:
            seeded = _Seeded.of(make, group, images.device)
            check_types(seeded.own, images)
            stepper = optimiser_of(seeded.networks.trained.values(), optimiser, rate, decay, momentum, fused=True)
            plan = schedule_of(stepper, schedule, rate, steps)
            found.append([seeded.checkpoint(0)] if 0 in kept else [])
            for step, index in enumerate(orders(group, len(images), epochs, batch, images.device)):
                x, y = floats(images[index]), labels[index]
                x = x if attacker is None else seeded.attacked(attacker, x, y, index, step)
                seeded.networks.learn(x, y, stepper)
                plan.step()
                epoch, rest = divmod((step + 1) * epochs, steps)
                if not rest and epoch in kept:
                    found[-1].append(seeded.checkpoint(epoch))
                bar.advance()
    return [_joined(parts) for parts in zip(*found, strict=True)]


@dataclass(eq=False)
class _Seeded:
    """Networks made and trained from one seed each."""

    networks: Stack
    own: nn.Module  # one of the networks, for checkpoints: its numbers are replaced
    seeds: tuple[int, ...]

    @staticmethod
    def of(make: Callable[[], nn.Module], seeds: tuple[int, ...], device: torch.device) -> _Seeded:
        models = [made(make, seed, device) for seed in seeds]
        _check_alike(models)
        networks = Stack.of(without_numbers(models[0]), stacked_state(models), draws=False)
        return _Seeded(networks, models[0].eval(), seeds)

    def attacked(self, attack: Attack, x: Tensor, y: Tensor, index: Tensor, step: int) -> Tensor:
        seeds = torch.stack([derived(seed, step) for seed in self.seeds])[:, None]
        with evaluating(self.networks.template):
            return attack(self.networks, x, y, seed=seeds, index=index)

    def checkpoint(self, epoch: int) -> Checkpoint:
        state = {name: stacked.clone() for name, stacked in self.networks.state().items()}
        return Checkpoint(epoch, self.seeds, state, self.own)


def _joined(parts: Sequence[Checkpoint]) -> Checkpoint:
    state = {name: torch.cat([part.state[name] for part in parts]) for name in parts[0].state}
    return Checkpoint(parts[0].epoch, tuple(seed for part in parts for seed in part.seeds), state, parts[0].template)


def _epochs_to_keep(keep: Iterable[int] | None, epochs: int) -> set[int]:
    kept = {epochs} if keep is None else set(keep)
    if wrong := sorted(epoch for epoch in kept if not 0 <= epoch <= epochs):
        raise ValueError(f"keep names epoch {wrong[0]}, but there are epochs 0 (before training) to {epochs}")
    return kept


def _check_alike(models: Sequence[nn.Module]) -> None:
    """Refuse networks that cannot be one function of stacked parameters, before torch does in its own words."""
    for name, module in models[0].named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            raise ValueError(f"{name!r} ({type(module).__name__}) draws random numbers: train such networks with fit")
    first = models[0].state_dict()
    for k, model in enumerate(models[1:], 1):
        for name, value in model.state_dict().items():
            there = tuple(first[name].shape) if name in first else "not there"
            if there != tuple(value.shape):
                raise ValueError(
                    f"need networks of one architecture: {name} of network 0 is {there}, of network {k} "
                    f"{tuple(value.shape)}"
                )
