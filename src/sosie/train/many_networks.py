"""Many networks trained at once, each as if alone: stacked into one function, or side by side on one GPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from ..checks import whole_number
from ..data.draws import derived
from ..process_state import SharedContext, switched
from ..progress import Progress
from .loop import Training, epoch_orders, fit
from .penalties import Attached
from .recipe import Recipe, check_data, check_types, floats, trainable

# Many networks of one architecture as one function of stacked parameters

State = dict[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)


class Stack:
    """Networks that are trained, and answer, all at once, each on its own inputs.

    A convolution becomes one with as many groups as there are networks, a linear layer a batched product. What all
    networks share (`shared`) is neither copied nor trained, and such a layer sees one large batch.

    A stack is made of the networks' `own` parameters and buffers (networks, …) and the `shared` ones; none is changed.
    `template`: a network on the device "meta" (`without_numbers`). `count`: the number of networks, needed if `own` is
    empty. `trains`: the names of what is trained, shared or not (None: all that requires gradients in the template).
    Each network has its own buffers, since batch norm writes to them. `mixed` computes in bfloat16; the trained
    parameters keep their type. `draws`: networks may draw random numbers (dropout), each its own.
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

        # Trained and held tensors (other parameters, and buffers) are (networks, …); shared ones are one for all.
        names = [name for name, _ in template.named_parameters()]
        self.trained: State = {name: copied(name).requires_grad_() for name in names if name in wanted}
        rest = [name for name in names if name not in wanted]
        self.held: State = {name: own[name].detach() for name in rest if name in own}
        self.shared: State = {name: shared[name].detach() for name in rest if name not in own}
        self.held |= {name: copied(name) for name, _ in template.named_buffers()}

    def __call__(self, x: Tensor) -> Tensor:
        """The answers of every network to its own inputs (networks, batch, …)."""
        trained, held, shared = self.trained, self.held, self.shared
        if self.mixed:  # by hand: autocast does not reach convolutions under vmap
            lowered = {name for name, _ in self.template.named_parameters()}
            trained, held, shared = (
                {name: t.to(torch.bfloat16) if name in lowered else t for name, t in part.items()}
                for part in (trained, held, shared)
            )
            x = x.to(torch.bfloat16)
        answer = vmap(
            lambda t, h, s, inputs: functional_call(self.template, {**t, **h, **s}, (inputs,)),
            in_dims=(0, 0, None, 0),
            randomness="different" if self.draws else "error",
        )
        try:
            answers = answer(trained, held, shared, x)
        except RuntimeError as error:
            rule = "" if self.draws else "must not draw random numbers, and "
            error.add_note(f"networks trained together {rule}must answer by tensors alone")
            raise
        return answers.float() if self.mixed else answers

    def learn(
        self, x: Tensor, y: Tensor, optimiser: torch.optim.Optimizer, pull: tuple[float, State] | None = None
    ) -> None:
        """Take one step with every network on its own batch (networks, batch, …) with labels (networks, batch).

        `pull`: a weight w and a state θ₀, (networks, …) or one for all, which add w/2 ‖θ − θ₀‖² to each loss.
        """
        loss = functional.cross_entropy(self(x).flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
        optimiser.zero_grad()
        loss.backward()
        if pull is not None:
            # The gradient of the square, added here: autograd would keep a difference for every parameter.
            weight, target = pull
            pulled = [(p, p.grad, target[name]) for name, p in self.trained.items() if p.grad is not None]
            if pulled:
                parameters, gradients, targets = (list(part) for part in zip(*pulled, strict=True))
                with torch.no_grad():
                    torch._foreach_add_(gradients, torch._foreach_sub(parameters, targets), alpha=weight)
        optimiser.step()

    @torch.no_grad()
    def answers(self, x: Tensor, batch: int = 500) -> Tensor:
        """The answers in evaluation mode, `batch` inputs per network at a time."""
        with self.evaluating():
            return torch.cat([self(part) for part in x.split(batch, dim=1)], dim=1)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode; the template is in training mode otherwise."""
        self.template.eval()
        try:
            yield
        finally:
            self.template.train()

    def state(self) -> State:
        """The networks' own parameters and buffers, (networks, …), without those they share."""
        return {name: stacked.detach() for name, stacked in {**self.trained, **self.held}.items()}


def without_numbers(model: nn.Module) -> nn.Module:
    """A copy of a network on the device "meta" in training mode: the template of a stack."""
    return copy.deepcopy(model).to("meta").train()


def stacked_state(models: Sequence[nn.Module]) -> State:
    """Parameters and buffers of networks of one architecture, (networks, …)."""
    states = [state_of(model) for model in models]
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def state_of(model: nn.Module) -> State:
    """Parameters and buffers by name; a tensor that is used in two places appears once."""
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def network(template: nn.Module, state: Mapping[str, Tensor], k: int) -> nn.Module:
    """Network k of a stacked state as a module, in evaluation mode; `template` is a network with numbers."""
    model = copy.deepcopy(template)
    with torch.no_grad():
        for name, tensor in state_of(model).items():
            tensor.copy_(state[name][k])
    return model.eval()


def orders(seeds: Sequence[int], count: int, epochs: int, batch: int, device: torch.device) -> Iterator[Tensor]:
    """The indices of the images of each step, (networks, batch), for each network those of `fit` with its seed."""
    each = [epoch_orders(count, seed) for seed in seeds]
    for _ in range(epochs):
        yield from torch.stack([next(order) for order in each]).to(device).split(batch, dim=1)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed random draws (first weights, dropout), and leave the global generators as found."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def build(make: Callable[[], Model], seed: int, device: torch.device) -> Model:
    """Call `make()` under a global seed; the global generators are left as found."""
    with seeded(seed, device):
        return make().to(device)


GROUP = 20  # networks that a CPU trains at once by default: they fit its caches


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
        """Network k as a module, in evaluation mode."""
        return network(self.template, self.state, k)

    def models(self) -> list[nn.Module]:
        return [self.model(k) for k in range(len(self))]

    def __call__(self, x: Tensor) -> Tensor:
        """The answers (networks, n, …) of the networks to inputs (networks, n, …) of their own."""
        return vmap(lambda state, inputs: functional_call(self.template, state, (inputs,)))(self.state, x)

    @torch.no_grad()
    def outputs(self, images: Tensor, *, batch: int = 1000) -> Tensor:
        """The answers (networks, n, …) of the networks to the same images."""
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
    """Train `count` networks at once, each with its own order of the images; returns checkpoints of the epochs `keep`.

    Network k is `make()` under the global seed seeds[k] (0, 1, 2 … if None), trained as by `fit` with that seed, up to
    rounding; an attack is made against each network at every step. `keep`: None keeps the last epoch; 0 is before
    training. Images are floats as the networks take them, or uint8, which are divided by 255; training runs on their
    device. `at_once` networks train in one call (None: all, on a CPU 20, which fit its caches); the result does not
    depend on it. Networks that draw random numbers (dropout) raise.
    """
    recipe.refuse("fit_together", "clip", "average", "augment", "mixed", "compiled")
    check_data(images, labels)
    kept = {recipe.epochs} if keep is None else set(keep)
    if wrong := sorted(epoch for epoch in kept if not 0 <= epoch <= recipe.epochs):
        raise ValueError(f"keep names epoch {wrong[0]}, but there are epochs 0 (before training) to {recipe.epochs}")
    every_seed = tuple(range(count)) if seeds is None else tuple(seeds)
    if len(every_seed) != count or count < 1:
        raise ValueError(f"need one seed per network: {count} networks, {len(every_seed)} seeds")
    attack, device = recipe.opened_attack(), images.device
    size = at_once or (GROUP if device.type == "cpu" else count)
    groups = [every_seed[start : start + size] for start in range(0, count, size)]
    an_epoch = recipe.steps(len(images))
    reached: dict[int, list[State]] = {epoch: [] for epoch in sorted(kept)}
    with Progress(task, recipe.epochs * an_epoch * len(groups), "steps") as bar:
        for group in groups:
            models = [build(make, seed, device) for seed in group]
            check_types(models[0], images, recipe)
            stack = Stack(without_numbers(models[0]), stacked_state(models), draws=False)
            optimiser = recipe.make_optimiser(stack.trained.values(), fused=True)
            schedule = recipe.make_schedule(optimiser, an_epoch)
            if 0 in kept:
                reached[0].append(copy.deepcopy(stack.state()))
            for step, index in enumerate(orders(group, len(images), recipe.epochs, recipe.batch, device), 1):
                x, y = floats(images[index]), labels[index]
                if attack is not None:
                    starts = torch.stack([derived(seed, step - 1) for seed in group])[:, None]
                    with stack.evaluating():
                        x = attack(lambda z: stack(recipe.prepared(z)), x, y, seed=starts, index=index)  # noqa: B023
                stack.learn(recipe.prepared(x), y, optimiser)
                schedule.step()
                epoch, rest = divmod(step, an_epoch)
                if not rest and epoch in kept:
                    reached[epoch].append(copy.deepcopy(stack.state()))
                bar.advance()
    template = models[0].eval()
    return [
        Checkpoint(epoch, every_seed, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, template)
        for epoch, parts in reached.items()
    ]


# Networks of any architecture on one GPU: their steps are recorded as CUDA graphs and replayed side by side

Kind = tuple[int, bool]  # the number of images of a step, and whether the penalty is due
AHEAD = 50  # steps whose images are made at once: random crops of so many hardly cost more than those of one batch
WARM = 2  # steps before a recording: libraries choose algorithms and make their workspaces
LOOKS = 5  # epochs between looks at the losses: each look waits for the GPU


class StepGraphs:
    """The steps of one network as CUDA graphs: replaying one launches hundreds of kernels in a single call.

    Everything that changes from step to step is in tensors that the step itself advances: the place among the prepared
    images, and the rate, read from a table. Each kind of step (the short last batch, with or without the penalty) has
    its own graph.
    """

    def __init__(self, training: Training, rates: Tensor, seed: int) -> None:
        device, count, batch = training.images.device, len(training.images), training.recipe.batch
        self.training, self.seed, self.penalty = training, seed, training.penalty
        self._rates, self._rate = rates, training.optimiser.param_groups[0]["lr"]
        self._stream = torch.cuda.Stream(device)
        self._orders = epoch_orders(count, seed)
        self._batch = batch
        self._order = torch.arange(count, device=device)
        self._draws = torch.zeros(count, 3, dtype=torch.long, device=device)
        first = self._order[: AHEAD * batch]
        self._x, self._y = training.batch(first, self._draws[: len(first)]).clone(), training.labels[first]
        self._place = torch.zeros((), dtype=torch.long, device=device)
        self._along = torch.arange(batch, device=device)
        self._sizes = [batch] * (count // batch) + [count % batch] * (count % batch > 0)
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}

    # Recording

    def record(self) -> None:
        """Record a graph of every kind of step; the network, its optimiser and its penalty are left as found."""
        self.training.model.train()
        before = {name: value.clone() for name, value in state_of(self.training.model).items()}
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self.training:
            for kind in self._kinds():
                for _ in range(WARM):
                    self._rewind()
                    self._step(kind)
            for kind in self._kinds():
                if kind[1] and isinstance(self.penalty, Attached) and not self.penalty.recordable:
                    continue
                self._rewind()
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                # One pool for all graphs of a network, which never run at the same time.
                pool = next(iter(self._graphs.values())).pool() if self._graphs else None
                with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                    self._step(kind)
                self._graphs[kind] = graph
            self._go_back(before)
        torch.cuda.synchronize()

    def _kinds(self) -> list[Kind]:
        every = self.penalty.every if isinstance(self.penalty, Attached) else 1
        due = [False] if self.penalty is None else [True] if every == 1 else [True, False]
        return [(size, each) for size in sorted(set(self._sizes), reverse=True) for each in due]

    def _step(self, kind: Kind) -> None:
        size, due = kind
        if isinstance(self.penalty, Attached):
            self.penalty.go_to(0 if due else 1)
        places = self._place + self._along[:size]
        self._rate.copy_(self._rates.take(self.training.taken))
        self.training.learn(self._x.index_select(0, places), self._y.index_select(0, places), places)
        self._place += size

    def _rewind(self) -> None:
        """Go back to the first step; a short training has fewer steps than there are kinds to record."""
        self._place.zero_()
        self.training.taken.zero_()

    @torch.no_grad()
    def _go_back(self, before: dict[str, Tensor]) -> None:
        for name, value in state_of(self.training.model).items():
            value.copy_(before[name])
        for state in self.training.optimiser.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()  # where every optimiser here starts
        self._rewind()
        self.training.failed.zero_()
        if isinstance(self.penalty, Attached):
            self.penalty.begin_again()

    # Replaying

    def shuffle(self, epoch: int) -> None:
        """Draw the order and the augmentation of the images in this epoch, as `fit` does."""
        count, augment = len(self._order), self.training.recipe.augment
        with torch.cuda.stream(self._stream):
            order = next(self._orders).pin_memory()
            self._order.copy_(order, non_blocking=True)  # else the host would wait for the epoch before
            if augment is not None:
                self._draws.copy_(augment.draws(count, self.seed, epoch, self._order.device))

    def replay(self, step: int, in_epoch: int) -> None:
        """Run the next step, number `step` of the training and `in_epoch` of its epoch, without waiting for the GPU."""
        due = self.penalty is not None and (not isinstance(self.penalty, Attached) or self.penalty.is_due(step))
        kind = (self._sizes[in_epoch], due)
        with torch.cuda.stream(self._stream):
            if in_epoch % AHEAD == 0:  # prepare the images of the next steps
                ahead = slice(in_epoch * self._batch, (in_epoch + AHEAD) * self._batch)
                index = self._order[ahead]
                self._x[: len(index)] = self.training.batch(index, self._draws[ahead])
                self._y[: len(index)] = self.training.labels[index]
                self._place.zero_()
            if kind in self._graphs:
                self._graphs[kind].replay()
            else:
                with self.training:
                    self._step(kind)
        if isinstance(self.penalty, Attached):
            self.penalty.go_to(step + 1)

    def look(self, k: int, an_epoch: int) -> None:
        """Wait for the GPU, and raise if a loss of this network, number k, was NaN or infinite."""
        self._stream.synchronize()
        try:
            self.training.look(an_epoch)
        except ValueError as error:
            error.add_note(f"in network {k} of those trained side by side (seed {self.seed})")
            raise


def fit_side_by_side(
    models: Sequence[nn.Module],
    images: Tensor,
    labels: Tensor,
    *,
    recipe: Recipe,
    seeds: Sequence[int],
    penalties: Sequence[Callable[[], Tensor] | None] | None = None,
    masks: Sequence[Any] | None = None,
    at_once: int = 10,
    after_epoch: Callable[[int, int], None] | None = None,
    task: str = "training side by side",
) -> list[nn.Module]:
    """Train every model as `fit` with its seed does, up to rounding; architectures may differ.

    A small network leaves most of a GPU idle, waiting for the next kernel to be launched. Here the whole step of each
    network (images, passes, penalty, optimiser, rate) is recorded once as a CUDA graph, and the graphs of `at_once`
    networks run on separate streams: on an H200 ten ResNet-20s at batch 128 take as long as `fit` takes for one. On a
    CPU they train one after the other.

    `penalties` and `masks`: one for each model, or None. The caller attaches the penalties (call this inside their
    `with` blocks). Masks do not change: `Regrow` decides on the host, so use `fit`. A penalty whose measure decomposes
    matrices (`mean_cca`) cannot be recorded: its due steps run unrecorded, slowly. `after_epoch(k, epoch)` is called
    for each network after each of its epochs.
    """
    count = len(models)
    each_penalty, each_mask = _one_each(penalties, count, "penalties"), _one_each(masks, count, "masks")
    if len(seeds) != count or not count:
        raise ValueError(f"need one seed per model: {count} models, {len(seeds)} seeds")
    _check_apart(models)
    whole_number(at_once, "at_once", least=1, why="the number of networks that train at the same time")
    check_data(images, labels)
    recipe.refuse("fit_side_by_side", "average", "attack", "compiled")

    def notify(k: int, epoch: int) -> None:
        if after_epoch is not None:
            after_epoch(k, epoch)
        models[k].train()

    if images.device.type != "cuda":
        for k, model in enumerate(models):
            fit(
                model, images, labels, recipe=recipe, seed=seeds[k], penalty=each_penalty[k], masks=each_mask[k],
                after_epoch=functools.partial(notify, k), task=f"{task}, {k + 1} of {count}",
            )  # fmt: skip
        return list(models)
    for model in models:
        check_types(model, images, recipe)
    an_epoch = recipe.steps(len(images))
    rates, padded = recipe.rates(an_epoch).to(images.device), recipe.padded(images)
    with Progress(task, recipe.epochs * -(-count // at_once), "epochs") as bar, _FASTEST:
        for start in range(0, count, at_once):
            group: dict[int, StepGraphs] = {}
            for k in range(start, min(start + at_once, count)):
                optimiser = recipe.make_optimiser(trainable(models[k]), fused=True, capturable=True)
                options: dict[str, Any] = {"optimiser": optimiser, "penalty": each_penalty[k], "masks": each_mask[k]}
                group[k] = StepGraphs(Training(models[k], padded, labels, recipe, **options), rates, seeds[k])
            for k, graphs in group.items():
                notify(k, 0)
                graphs.record()
            for epoch in range(1, recipe.epochs + 1):
                for graphs in group.values():
                    graphs.shuffle(epoch - 1)
                for step in range(an_epoch):
                    for graphs in group.values():
                        graphs.replay((epoch - 1) * an_epoch + step, step)
                if after_epoch is not None or epoch % LOOKS == 0 or epoch == recipe.epochs:
                    for k, graphs in group.items():
                        graphs.look(k, an_epoch)
                        notify(k, epoch)
                bar.advance()
            for graphs in group.values():
                graphs.training.optimiser.zero_grad()  # gradients would hold on to the memory of the graphs
    return [model.eval() for model in models]


def _check_apart(models: Sequence[nn.Module]) -> None:
    """Raise if networks that train at the same time share a parameter or buffer."""
    owner: dict[int, int] = {}
    for k, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if owner.setdefault(id(tensor), k) != k:
                raise ValueError(
                    f"networks {owner[id(tensor)]} and {k} share {name!r}, which both would train at the same time: "
                    "make copies with copy.deepcopy"
                )


def _one_each(values: Sequence[Any] | None, count: int, name: str) -> Sequence[Any]:
    each = [None] * count if values is None else list(values)
    if len(each) != count:
        raise ValueError(f"{name}: need one for each of {count} models, or None in its place; got {len(each)}")
    return each


# cuDNN tries its algorithms on the first call of a shape: worth it for a step that is replayed ten thousand times.
_FASTEST = SharedContext(lambda: switched(torch.backends.cudnn, "benchmark", True))
