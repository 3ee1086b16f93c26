"""A step of training recorded as CUDA graphs: replaying one asks the GPU for hundreds of kernels in a single call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attached import Attached
from .training import Training

Penalty = Callable[[], Tensor]
Kind = tuple[int, bool]  # how many images a step takes, and whether the penalty is due
AHEAD = 50  # steps whose images are made at once: random crops of so many cost hardly more than those of one batch
WARM = 2  # steps before a recording: libraries choose algorithms and make their workspaces


class Recorded:
    """The steps of one network. Everything that changes from step to step is in tensors that the step itself moves on:

    the place among the images made ready, and the rate, read from a table. What differs in kind (the short last batch,
    a step with or without the penalty) is a graph of its own.
    """

    def __init__(
        self, training: Training, rates: Tensor, seed: int, batch: int, penalty: Penalty | None = None
    ) -> None:
        device, count = training.images.device, len(training.images)
        self.training, self.seed, self.penalty = training, seed, penalty
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
                if self._can_be_recorded(kind):
                    self._rewind()
                    graph = torch.cuda.CUDAGraph()
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph, pool=self._pool(), stream=self._stream):
                        self._step(kind)
                    self._graphs[kind] = graph
            self._go_back(before)
        torch.cuda.synchronize()

    def _kinds(self) -> list[Kind]:
        every = self.penalty.every if isinstance(self.penalty, Attached) else 1
        due = [False] if self.penalty is None else [True] if every == 1 else [True, False]
        return [(size, each) for size in sorted(set(self._sizes), reverse=True) for each in due]

    def _can_be_recorded(self, kind: Kind) -> bool:
        return not kind[1] or not isinstance(self.penalty, Attached) or self.penalty.recordable

    def _pool(self) -> Any:
        """One for all graphs of a network: they never run at the same time."""
        return next(iter(self._graphs.values())).pool() if self._graphs else None

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
        count, augment = len(self._order), self.training.augment
        with torch.cuda.stream(self._stream):
            order = torch.randperm(count, generator=self._random)
            self._order.copy_(order.pin_memory(), non_blocking=True)  # else the host would wait for the epoch before
            if augment is not None:
                self._draws.copy_(augment.draws(count, self.seed, epoch, self._order.device))

    def _make_ready(self, first: int) -> None:
        """The images of the steps from this one of the epoch on."""
        some = slice(first * self._batch, (first + AHEAD) * self._batch)
        index = self._order[some]
        self._x[: len(index)] = self.training.batch(index, self._draws[some])
        self._y[: len(index)] = self.training.labels[index]
        self._place.zero_()

    def replay(self, step: int, in_epoch: int) -> None:
        """The next step, which is this one of the training and of its epoch; nothing is waited for."""
        due = self.penalty is not None and (not isinstance(self.penalty, Attached) or self.penalty.is_due(step))
        kind = (self._sizes[in_epoch], due)
        with torch.cuda.stream(self._stream):
            if in_epoch % AHEAD == 0:
                self._make_ready(in_epoch)
            if kind in self._graphs:
                self._graphs[kind].replay()
            else:
                with self.training:
                    self._step(kind)
        if isinstance(self.penalty, Attached):
            self.penalty.go_to(step + 1)

    def wait(self) -> None:
        self._stream.synchronize()
