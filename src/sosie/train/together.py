"""Many small networks of one architecture trained at once, each as if it were alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from ..data.draws import derived
from ..progress import Progress
from .recipe import Recipe, check_data, check_types, floats

# Many networks of one architecture as one function of stacked parameters

State = dict[str, Tensor]


class Stack:
    """Networks that are trained, and answer, all at once, each on inputs of its own.

    A convolution becomes one of as many groups as there are networks, a linear layer a batched product; what all
    networks have in common (`shared`) is neither copied nor trained, and such a layer sees one large batch.

    Made from the networks' own parameters and buffers (networks, …) and those they share; none is changed. `template`:
    a network on the device "meta" (`without_numbers`). `count`: of networks, if none has its own. `trains`: the names
    of what is trained, be it shared before (None: all that requires gradients there). Buffers are each network's own:
    batch norm writes to them. `mixed` computes in bfloat16; what is trained stays as it is. `draws`: networks may draw
    random numbers (dropout), each its own.
    """

    def __init__(
        self,
        template: nn.Module,
        own: Mapping[str, Tensor],
        shared: Mapping[str, Tensor] | None = None,
        *,
        count: int | None = None,
        trains: Collection[str] | None = None,
        mixed: bool = False,
        draws: bool = True,
    ) -> None:
        for name, module in template.named_modules() if mixed else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"{name} ({type(module).__name__}) has averages in float32, which vmap cannot mix with bfloat16: "
                    "train such networks with mixed=False"
                )
        self.template, self.mixed, self.draws = template, mixed, draws
        shared = {} if shared is None else shared
        networks = len(next(iter(own.values()))) if count is None else count
        wanted = {name for name, p in template.named_parameters() if p.requires_grad} if trains is None else set(trains)

        def copied(name: str) -> Tensor:
            stacked = own[name] if name in own else shared[name].expand(networks, *shared[name].shape)
            return stacked.detach().clone(memory_format=torch.contiguous_format)

        # What is trained, and what is held (other parameters, and buffers), are (networks, …); shared: one for all.
        names = [name for name, _ in template.named_parameters()]
        self.trained: State = {name: copied(name).requires_grad_() for name in names if name in wanted}
        rest = [name for name in names if name not in wanted]
        self.held: State = {name: own[name].detach() for name in rest if name in own}
        self.shared: State = {name: shared[name].detach() for name in rest if name not in own}
        self.held |= {name: copied(name) for name, _ in template.named_buffers()}

    def __call__(self, x: Tensor) -> Tensor:
        """What every network answers to its own inputs (networks, batch, …)."""
        trained, held, shared = self.trained, self.held, self.shared
        if self.mixed:
            # Autocast does not reach convolutions under vmap.
            trained, held, shared = (self._lowered(part) for part in (trained, held, shared))
            x = x.to(torch.bfloat16)
        answer = vmap(
            lambda t, h, s, own: functional_call(self.template, {**t, **h, **s}, (own,)),
            in_dims=(0, 0, None, 0),
            randomness="different" if self.draws else "error",
        )
        try:
            found = answer(trained, held, shared, x)
        except RuntimeError as error:
            rule = "" if self.draws else "must not draw random numbers, and "
            error.add_note(f"networks trained together {rule}must answer by tensors alone")
            raise
        return found.float() if self.mixed else found

    def learn(
        self, x: Tensor, y: Tensor, stepper: torch.optim.Optimizer, pull: tuple[float, State] | None = None
    ) -> None:
        """One step of every network on its own batch (networks, batch, …) with labels (networks, batch).

        `pull`: a weight w and a state θ₀, (networks, …) or one for all, that adds w/2 ‖θ − θ₀‖² to each loss.
        """
        loss = functional.cross_entropy(self(x).flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
        stepper.zero_grad()
        loss.backward()
        if pull is not None:
            self._pull(*pull)
        stepper.step()

    @torch.no_grad()
    def answers(self, x: Tensor, batch: int = 500) -> Tensor:
        """As a call, in evaluation mode, a part of the inputs at a time."""
        with evaluating(self.template):
            return torch.cat([self(part) for part in x.split(batch, dim=1)], dim=1)

    def state(self) -> State:
        """Everything that belongs to each network, (networks, …); without what they share."""
        return {name: stacked.detach() for name, stacked in {**self.trained, **self.held}.items()}

    def _pull(self, weight: float, towards: State) -> None:
        # The gradient of the square, added by hand: autograd would keep a difference for every parameter.
        pulled = [(p, p.grad, towards[name]) for name, p in self.trained.items() if p.grad is not None]
        if pulled:
            here, gradients, there = (list(part) for part in zip(*pulled, strict=True))
            with torch.no_grad():
                torch._foreach_add_(gradients, torch._foreach_sub(here, there), alpha=weight)

    def _lowered(self, state: State) -> State:
        parameters = {name for name, _ in self.template.named_parameters()}
        return {name: t.to(torch.bfloat16) if name in parameters else t for name, t in state.items()}


def without_numbers(model: nn.Module) -> nn.Module:
    """The code of a network in training mode, as the template of a stack."""
    return copy.deepcopy(model).to("meta").train()


def stacked_state(models: Sequence[nn.Module]) -> State:
    """Parameters and buffers of networks of one architecture, (networks, …)."""
    each = [state_of(model) for model in models]
    return {name: torch.stack([state[name] for state in each]) for name in each[0]}


def state_of(model: nn.Module) -> State:
    """Parameters and buffers, a tensor that is used in two places once."""
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def network(template: nn.Module, state: Mapping[str, Tensor], k: int) -> nn.Module:
    """Network k of a stacked state as a module of its own, in evaluation mode; `template` holds numbers."""
    model = copy.deepcopy(template)
    with torch.no_grad():
        for name, own in state_of(model).items():
            own.copy_(state[name][k])
    return model.eval()


def orders(seeds: Sequence[int], count: int, epochs: int, batch: int, device: torch.device) -> Iterator[Tensor]:
    """The numbers of the images of each step, (networks, batch): of each network as `fit` with its seed has them."""
    own = [torch.Generator().manual_seed(seed) for seed in seeds]  # on the CPU: the same order on every device
    for _ in range(epochs):
        epoch = torch.stack([torch.randperm(count, generator=generator) for generator in own])
        yield from epoch.to(device).split(batch, dim=1)


@contextmanager
def evaluating(template: nn.Module) -> Iterator[None]:
    template.eval()
    try:
        yield
    finally:
        template.train()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a seed (first weights, dropout), and leave the global generators as found."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def made(make: Callable[[], nn.Module], seed: int, device: torch.device) -> nn.Module:
    """`make()` under a global seed, which is left as found."""
    with seeded(seed, device):
        return make().to(device)


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
    recipe: Recipe,
    seeds: Sequence[int] | None = None,
    keep: Iterable[int] | None = None,
    at_once: int | None = None,
    task: str = "training together",
) -> list[Checkpoint]:
    """Train `count` networks at once, each on its own order of the images; the checkpoints after the epochs in `keep`.

    Network k is `make()` under the global seed seeds[k] (0, 1, 2 … if None) and is trained as `fit` with that seed
    trains it, to rounding; an attack of the recipe sees each network as it is then. `keep`: None keeps the last epoch;
    0 is before training. Images are floats as the networks take them, or uint8, which become [0, 1]; the networks are
    trained where the images are; `at_once` of them in one call (None: all, on a CPU 20, which its caches hold), without
    effect on the result. Networks that draw random numbers themselves (dropout) are refused.
    """
    recipe.refuse("fit_together", "clip", "average", "augment", "mixed", "compiled")
    check_data(images, labels)
    kept = {recipe.epochs} if keep is None else set(keep)
    if wrong := sorted(epoch for epoch in kept if not 0 <= epoch <= recipe.epochs):
        raise ValueError(f"keep names epoch {wrong[0]}, but there are epochs 0 (before training) to {recipe.epochs}")
    own_seeds = tuple(range(count)) if seeds is None else tuple(seeds)
    if len(own_seeds) != count or count < 1:
        raise ValueError(f"need one seed per network: {count} networks, {len(own_seeds)} seeds")
    attack, device = recipe.opened_attack(), images.device
    size = at_once or (GROUP if device.type == "cpu" else count)
    groups = [own_seeds[start : start + size] for start in range(0, count, size)]
    an_epoch = recipe.steps(len(images))
    reached: dict[int, list[State]] = {epoch: [] for epoch in sorted(kept)}
    with Progress(task, recipe.epochs * an_epoch * len(groups), "steps") as bar:
        for group in groups:
            models = [made(make, seed, device) for seed in group]
            _check_alike(models)
            check_types(models[0], images, recipe)
            stack = Stack(without_numbers(models[0]), stacked_state(models), draws=False)
            stepper = recipe.make_optimiser(stack.trained.values(), fused=True)
            plan = recipe.make_schedule(stepper, an_epoch)
            if 0 in kept:
                reached[0].append(copy.deepcopy(stack.state()))
            for step, index in enumerate(orders(group, len(images), recipe.epochs, recipe.batch, device), 1):
                x, y = floats(images[index]), labels[index]
                if attack is not None:
                    starts = torch.stack([derived(seed, step - 1) for seed in group])[:, None]
                    with evaluating(stack.template):
                        x = attack(lambda z: stack(recipe.prepared(z)), x, y, seed=starts, index=index)  # noqa: B023
                stack.learn(recipe.prepared(x), y, stepper)
                plan.step()
                epoch, rest = divmod(step, an_epoch)
                if not rest and epoch in kept:
                    reached[epoch].append(copy.deepcopy(stack.state()))
                bar.advance()
    template = models[0].eval()
    return [
        Checkpoint(epoch, own_seeds, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, template)
        for epoch, parts in reached.items()
    ]


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
