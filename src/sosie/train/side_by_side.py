"""Several networks on one GPU, each trained as if it were alone: their steps are recorded and replayed side by side."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import whole_number
from ..process_state import Shared, switched
from ..progress import Progress
from .loop import Training, fit
from .recipe import Recipe, check_data, check_types, trained
from .taps import Attached

Penalty = Callable[[], Tensor]
Kind = tuple[int, bool]  # how many images a step takes, and whether the penalty is due
AHEAD = 50  # steps whose images are made at once: random crops of so many cost hardly more than those of one batch
WARM = 2  # steps before a recording: libraries choose algorithms and make their workspaces
LOOKS = 5  # epochs between looks at the losses, for which the GPU is waited for


class StepGraphs:
    """The steps of one network as CUDA graphs: replaying one asks the GPU for hundreds of kernels in a single call.

    Everything that changes from step to step is in tensors that the step itself moves on: the place among the images
    made ready, and the rate, read from a table. What differs in kind (the short last batch, a step with or without the
    penalty) is a graph of its own.
    """

    def __init__(self, training: Training, rates: Tensor, seed: int) -> None:
        device, count, batch = training.images.device, len(training.images), training.recipe.batch
        self.training, self.seed, self.penalty = training, seed, training.penalty
        self._rates, self._rate = rates, training.stepper.param_groups[0]["lr"]
        self._stream = torch.cuda.Stream(device)
        self._random = torch.Generator().manual_seed(seed)  # on the CPU: the same order as `fit` takes
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
        """A graph of every kind of step there is; the network, its optimiser and its penalty are left as found."""
        self.training.model.train()
        before = {name: value.clone() for name, value in self._state().items()}
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
                # One pool for all graphs of a network: they never run at the same time.
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

    def _state(self) -> dict[str, Tensor]:
        model: nn.Module = self.training.model
        return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}

    def _rewind(self) -> None:
        """To the first step of all; a short training has fewer than there are kinds to record."""
        self._place.zero_()
        self.training.taken.zero_()

    @torch.no_grad()
    def _go_back(self, before: dict[str, Tensor]) -> None:
        for name, value in self._state().items():
            value.copy_(before[name])
        for state in self.training.stepper.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()  # what every optimiser here starts from
        self._rewind()
        self.training.failed.zero_()
        if isinstance(self.penalty, Attached):
            self.penalty.begin_again()

    # Replaying

    def shuffle(self, epoch: int) -> None:
        """The order of the images in this epoch, and how they are changed, as `fit` draws them."""
        count, augment = len(self._order), self.training.recipe.augment
        with torch.cuda.stream(self._stream):
            order = torch.randperm(count, generator=self._random)
            self._order.copy_(order.pin_memory(), non_blocking=True)  # else the host would wait for the epoch before
            if augment is not None:
                self._draws.copy_(augment.draws(count, self.seed, epoch, self._order.device))

    def replay(self, step: int, in_epoch: int) -> None:
        """The next step, which is this one of the training and of its epoch; nothing is waited for."""
        due = self.penalty is not None and (not isinstance(self.penalty, Attached) or self.penalty.is_due(step))
        kind = (self._sizes[in_epoch], due)
        with torch.cuda.stream(self._stream):
            if in_epoch % AHEAD == 0:  # make the images of the next steps ready
                some = slice(in_epoch * self._batch, (in_epoch + AHEAD) * self._batch)
                index = self._order[some]
                self._x[: len(index)] = self.training.batch(index, self._draws[some])
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
        """Wait for the GPU, and raise if a loss of this network, the k-th, was NaN or infinite."""
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
    penalties: Sequence[Penalty | None] | None = None,
    masks: Sequence[Any] | None = None,
    at_once: int = 10,
    after_epoch: Callable[[int, int], None] | None = None,
    task: str = "training side by side",
) -> list[nn.Module]:
    """Train every model as `fit` with its seed trains it, to rounding; they may be of different architectures.

    A small network leaves most of a GPU idle, which waits for the next kernel to be asked for. Here the whole step of
    each network (images, passes, penalty, optimiser, rate) is recorded once as a CUDA graph, and the graphs of
    `at_once` networks run on streams of their own: on an H200 ten ResNet-20s at batch 128 take as long as `fit` takes
    for one. On a CPU they train one after the other.

    `penalties` and `masks`: one for each model, or None. Penalties are attached by the caller (inside their `with`
    blocks). Masks stay as they are: what moves them (`Regrow`) decides on the host, so use `fit`. A penalty whose
    measure decomposes matrices (`mean_cca`) cannot be recorded: its due steps run as they are, slowly.
    `after_epoch(k, epoch)` is called for each network after each of its epochs.
    """
    count = len(models)
    own_penalties, own_masks = _one_each(penalties, count, "penalties"), _one_each(masks, count, "masks")
    if len(seeds) != count or not count:
        raise ValueError(f"need one seed per model: {count} models, {len(seeds)} seeds")
    _check_apart(models)
    whole_number(at_once, "at_once", least=1, why="how many networks train at a time")
    check_data(images, labels)
    recipe.refuse("fit_side_by_side", "average", "attack", "compiled")

    def tell(k: int, epoch: int) -> None:
        if after_epoch is not None:
            after_epoch(k, epoch)
        models[k].train()

    if images.device.type != "cuda":
        for k, model in enumerate(models):
            fit(
                model, images, labels, recipe=recipe, seed=seeds[k], penalty=own_penalties[k], masks=own_masks[k],
                after_epoch=functools.partial(tell, k), task=f"{task}, {k + 1} of {count}",
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
                stepper = recipe.make_optimiser(trained(models[k]), fused=True, capturable=True)
                given: dict[str, Any] = {"stepper": stepper, "penalty": own_penalties[k], "masks": own_masks[k]}
                group[k] = StepGraphs(Training(models[k], padded, labels, recipe, **given), rates, seeds[k])
            for k, each in group.items():
                tell(k, 0)
                each.record()
            for epoch in range(1, recipe.epochs + 1):
                for each in group.values():
                    each.shuffle(epoch - 1)
                for step in range(an_epoch):
                    for each in group.values():
                        each.replay((epoch - 1) * an_epoch + step, step)
                if after_epoch is not None or epoch % LOOKS == 0 or epoch == recipe.epochs:
                    for k, each in group.items():
                        each.look(k, an_epoch)
                        tell(k, epoch)
                bar.advance()
            for each in group.values():
                each.training.stepper.zero_grad()  # gradients would hold on to the memory of the graphs
    return [model.eval() for model in models]


def _check_apart(models: Sequence[nn.Module]) -> None:
    """Networks that share a part would each train it, at the same time."""
    if len({id(model) for model in models}) < len(models):
        raise ValueError("one model is given twice: networks trained side by side are models of their own")
    owner: dict[int, int] = {}
    for k, model in enumerate(models):
        for name, number in itertools.chain(model.named_parameters(), model.named_buffers()):
            if owner.setdefault(id(number), k) != k:
                raise ValueError(
                    f"networks {owner[id(number)]} and {k} share {name!r}: those trained side by side have nothing in "
                    "common; copy.deepcopy makes a part their own"
                )


def _one_each(given: Sequence[Any] | None, count: int, name: str) -> Sequence[Any]:
    each = [None] * count if given is None else list(given)
    if len(each) != count:
        raise ValueError(f"{name}: need one for each of {count} models, or None in its place; got {len(each)}")
    return each


# cuDNN tries its algorithms on the first call of a shape: it pays when a step is replayed ten thousand times.
_FASTEST = Shared(lambda: switched(torch.backends.cudnn, "benchmark", True))
