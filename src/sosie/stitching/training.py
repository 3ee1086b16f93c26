"""Task-loss matching: many joints between the same two frozen halves are trained at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..capture import as_found
from ..linalg import Affine, JointMoments, explained
from ..progress import Progress
from .halves import CutModel
from .joint import Joint, scatter, similarity_at_joint
from .task_loss import ActivationCache, JointStack, Losses, Objective, TaskLoss, UserLoss, start_of

# What happened in training, joint by joint: history, the best layer so far, and who has to stop

INDICES = ("linear_cka", "mean_cca", "svcca")


@dataclass(frozen=True)
class Trained:
    """A layer, how it was found, and a line for the start and for each epoch."""

    affine: Affine
    history: list[dict[str, float]]


class Journal:
    """Of one group of joints. With a validation loss the layer of the epoch with the lowest is kept, else the last.

    A joint whose loss is not finite stops and keeps the layer of the epoch with the lowest loss before.
    """

    def __init__(self, tasks: Sequence[TaskLoss], stack: JointStack, moments: JointMoments) -> None:
        self.tasks, self.stack, self.moments = tasks, stack, moments
        self._of_b = scatter(self.moments, "b")
        self.going = torch.ones(stack.count, dtype=torch.bool)
        self._failed = torch.zeros(stack.count, dtype=torch.bool)
        self._best = torch.full((stack.count,), torch.inf, dtype=torch.float64)
        self._best_epoch = [0] * stack.count
        self._last_epoch = [0] * stack.count
        self._best_state = stack.state()
        self._validated = False
        self.history: list[list[dict[str, float]]] = [[] for _ in tasks]

    @property
    def any_going(self) -> bool:
        return bool(self.going.any())

    def begin(self, start: Losses, validation: Losses | None) -> None:
        self._validated = validation is not None
        losses = start.loss
        for k in (~losses.isfinite()).nonzero().flatten().tolist():
            self._fail(k, 0, 0, float(losses[k]))
        self._record(0, start, validation)

    def end_of(self, epoch: int, steps: Sequence[Losses], counts: Sequence[int], validation: Losses | None) -> None:
        """The only place where the device is waited for."""
        table = torch.stack([lost.loss for lost in steps]).double().cpu()  # (steps, K)
        intact = self.stack.finite().cpu()
        for k in self.going.nonzero().flatten().tolist():
            bad = (~table[:, k].isfinite()).nonzero().flatten().tolist()
            if bad:
                self._fail(k, epoch, bad[0] + 1, float(table[bad[0], k]))
            elif not intact[k]:
                self._fail(k, epoch, len(steps), float("nan"))
        self._record(epoch, Losses.mean(steps, counts), validation)
        for k in self.going.nonzero().flatten().tolist():
            patience = self.tasks[k].patience
            if patience is not None and epoch - self._best_epoch[k] >= patience:
                self.going[k] = False

    def trained(self) -> list[Trained]:
        keep_best = torch.full_like(self.going, self._validated) | self._failed
        place = self.stack.bias.device
        state = self.stack.mixed(keep_best.to(place), self._best_state, self.stack.state())
        weights, biases = self.stack.maps(state)
        return [
            self._finished(k, weights[k], biases[k], self._best_epoch[k] if keep_best[k] else self._last_epoch[k])
            for k in range(len(self.tasks))
        ]

    def _finished(self, k: int, weight: Tensor, bias: Tensor, epoch: int) -> Trained:
        weight = torch.where(weight.abs() < self.tasks[k].threshold, 0.0, weight)
        found = Affine(weight, bias)
        kept = next((line for line in self.history[k] if line["epoch"] == epoch), {})
        report: dict[str, Any] = {
            "r2": explained(self.moments, found),
            "rank": int(torch.linalg.matrix_rank(weight.to(self.stack.bias.dtype))),
            "condition": 1.0,
            "iterations": self.history[k][-1]["step"] if self.history[k] else 0,
            "sparsity": float((weight == 0).double().mean()),
            "epoch": epoch,
            **{key: kept[key] for key in ("loss", "validation", "cross_entropy") if key in kept},
        }
        return Trained(Affine(weight, bias, report), self.history[k])

    def _record(self, epoch: int, training: Losses, validation: Losses | None) -> None:
        """A line for every joint that goes on, and its layer if it is the best so far."""
        weights, biases = self.stack.maps(self.stack.state())
        scores = training.loss if validation is None else validation.loss
        better = self.going & (scores < self._best)
        for k in self.going.nonzero().flatten().tolist():
            line = {"epoch": epoch, "step": self.stack.steps, "loss": float(training.loss[k])}
            if validation is not None:
                line["validation"] = float(validation.loss[k])
            if training.cross_entropy is not None:
                line["cross_entropy"] = float(training.cross_entropy[k])
            if self._recorded(self.tasks[k], epoch):
                line |= self._indices(Affine(weights[k], biases[k]))
            self.history[k].append(line)
            self._last_epoch[k] = epoch
            if better[k]:
                self._best[k], self._best_epoch[k] = scores[k], epoch
        chosen = better.to(self.stack.bias.device)
        self._best_state = self.stack.mixed(chosen, self.stack.state(), self._best_state)

    def _recorded(self, task: TaskLoss, epoch: int) -> bool:
        return task.record > 0 and (epoch % task.record == 0 or epoch == task.epochs)

    def _indices(self, affine: Affine) -> dict[str, float]:
        found = {
            "r2": explained(self.moments, affine),
            "r2_about_zero": explained(self.moments, affine, about="zero"),
        }
        try:
            return found | similarity_at_joint(self.moments, affine, INDICES, of_b=self._of_b)
        except ValueError:  # a map to one point, as a strong l1 may make it, is like nothing: the line goes without
            return found

    def _fail(self, k: int, epoch: int, step: int, value: float) -> None:
        self.going[k] = False
        self._failed[k] = True
        where = f"in epoch {epoch}, at step {step} of it" if epoch else "at the start"
        warnings.warn(
            f"{self.tasks[k].name}: the loss is {value} {where}; this joint stops and keeps its best layer so far, of "
            f"epoch {self._best_epoch[k]}. A smaller rate may help",
            stacklevel=2,
        )


FOLDED = 2**30  # bytes of activations at the joint in one step; joints beyond that wait for the next turn
HELD_OUT = 10  # one input of so many is held out for early stopping where no validation data are given


@dataclass(frozen=True)
class JointTrainer:
    """What all joints of one call share: the frozen halves, the moments at the sites, the inputs."""

    lower: CutModel
    upper: CutModel
    joint: Joint  # for its form; its weights are not used
    moments: JointMoments
    inputs: Any
    validation: Any = None
    loss: UserLoss | None = None

    def train(self, tasks: Sequence[TaskLoss]) -> list[Trained]:
        """One layer for each task, in their order; those of the same epochs and batch size are trained together."""
        like = next((p for p in self.upper.model.parameters() if p.is_floating_point()), torch.zeros(()))
        starts = [start_of(task, self.moments) for task in tasks]
        found: dict[int, Trained] = {}
        with as_found([self.lower.model, self.upper.model]):  # which also puts the flags back
            for model in (self.lower.model, self.upper.model):
                model.requires_grad_(False)
            kept, validation = self._kept(tasks, like)
            self._check(tasks, kept, validation)
            for group in _groups(tasks, self._together(like)):
                stack = JointStack([tasks[k] for k in group], [starts[k] for k in group], like)
                run = _Run(self, [tasks[k] for k in group], stack, kept, validation)
                found.update(zip(group, run.trained(), strict=True))
        return [found[k] for k in range(len(tasks))]

    def _kept(self, tasks: Sequence[TaskLoss], like: Tensor) -> tuple[ActivationCache, ActivationCache | None]:
        rows_of_b = any(task.cka for task in tasks)
        return tuple(  # type: ignore[return-value]
            None
            if inputs is None
            else ActivationCache(self.lower, self.upper, self.joint, inputs, rows_of_b=rows_of_b, like=like)
            for inputs in (self.inputs, self.validation)
        )

    def _together(self, like: Tensor) -> int:
        """Numbers at the joint that fit into one step."""
        return FOLDED // like.element_size() // (self.joint.target.channels * max(1, _positions(self.joint)))

    def _check(self, tasks: Sequence[TaskLoss], *supplies: ActivationCache | None) -> None:
        for kept in supplies:
            if kept is None or self.loss is not None:
                continue
            if kept.soft is None:
                raise ValueError(
                    "task_loss needs a network B that answers (inputs, classes); for other answers give "
                    "loss(outputs, batch)"
                )
            if any(task.targets == "labels" for task in tasks):
                _check_labels(kept.labels, kept.soft.shape[1])
        if any(task.patience for task in tasks) and supplies[1] is None and supplies[0].n < HELD_OUT:  # type: ignore[union-attr]
            raise ValueError(
                f"patience holds out a tenth of the inputs, and there are fewer than {HELD_OUT}: give validation="
            )


class _Run:
    """The training of one group."""

    def __init__(
        self,
        bench: JointTrainer,
        tasks: Sequence[TaskLoss],
        stack: JointStack,
        kept: ActivationCache,
        validation: ActivationCache | None,
    ) -> None:
        self.tasks, self.stack, self.kept = tasks, stack, kept
        self.objective = Objective(tasks, bench.upper, bench.joint.target, bench.loss, stack.bias)
        self.orders = _Orders(tasks, kept.n, held_out=validation is None and tasks[0].patience is not None)
        self.validation = validation
        self.journal = Journal(tasks, stack, bench.moments)
        self._device = stack.bias.device

    def trained(self) -> list[Trained]:
        first = self.tasks[0]
        self.objective.settle(self.stack, self.kept, self.orders.train[:, :2].to(self._device))
        many = f"{len(self.tasks)} joints" if len(self.tasks) > 1 else "a joint"
        with Progress(f"training {many}", first.epochs, "epochs") as bar:
            start = self._over(self.kept, self.orders.train)
            self.journal.begin(start, self._validate())
            for epoch in range(1, first.epochs + 1):
                if not self.journal.any_going:
                    break
                losses, counts = self._epoch(0.1 ** (3 * (epoch - 1) // first.epochs))
                self.journal.end_of(epoch, losses, counts, self._validate())
                bar.advance()
        return self.journal.trained()

    def _epoch(self, factor: float) -> tuple[list[Losses], list[int]]:
        """One pass over the inputs; what was lost at every step, still on the device, and of how many inputs."""
        found, counts = [], []
        for index in self._batches(self.orders.next_epoch()):
            with torch.enable_grad():
                lost = self.objective(self.stack, self.kept, index)
                gradients = torch.autograd.grad(lost.loss.sum(), self.stack.tensors)
            self.stack.step(gradients, factor)
            found.append(lost.detached())
            counts.append(index.shape[1])
        return found, counts

    def _validate(self) -> Losses | None:
        if self.validation is not None:
            return self._over(self.validation, torch.arange(self.validation.n)[None])
        return self._over(self.kept, self.orders.held_out) if self.orders.held_out is not None else None

    def _over(self, kept: ActivationCache, order: Tensor) -> Losses:
        """The mean over inputs, without training."""
        batches = list(self._batches(order))
        return Losses.mean(
            [self.objective(self.stack, kept, index) for index in batches], [b.shape[1] for b in batches]
        )

    def _batches(self, order: Tensor) -> Iterator[Tensor]:
        """(J, m) at a time; a last batch of one input, which has no CKA, joins the one before."""
        size = self.tasks[0].batch
        order = order.to(self._device, non_blocking=True)
        n = order.shape[1]
        ends = list(range(size, n, size))
        if ends and size > 1 and n - ends[-1] == 1:
            ends.pop()
        yield from torch.tensor_split(order, ends, dim=1)


class _Orders:
    """Which inputs each joint is trained on and in which order, by its seed alone; (1, n) where all have one seed."""

    def __init__(self, tasks: Sequence[TaskLoss], n: int, *, held_out: bool) -> None:
        seeds = [task.seed for task in tasks]
        self._owners = seeds if len(set(seeds)) > 1 else seeds[:1]
        self._generators = {seed: torch.Generator().manual_seed(seed) for seed in set(seeds)}
        shuffled = self._permuted(n) if held_out else torch.arange(n).expand(len(self._owners), -1)
        cut = n // HELD_OUT if held_out else 0
        self.held_out = shuffled[:, :cut] if held_out else None
        self.train = shuffled[:, cut:]

    def next_epoch(self) -> Tensor:
        return self.train.gather(1, self._permuted(self.train.shape[1]))

    def _permuted(self, n: int) -> Tensor:
        """Each seed's generator is used once, whoever shares it."""
        made = {seed: torch.randperm(n, generator=generator) for seed, generator in self._generators.items()}
        return torch.stack([made[seed] for seed in self._owners])


def _groups(tasks: Sequence[TaskLoss], room: int) -> Iterator[list[int]]:
    """Places of tasks that are trained together: those of whole matrices before those of factors."""
    groups: dict[object, list[int]] = {}
    for k, task in enumerate(tasks):
        groups.setdefault((task.epochs, task.batch, task.autocast, task.patience is None), []).append(k)
    for group in groups.values():
        ordered = sorted(group, key=lambda k: tasks[k].rank is not None)
        most = max(1, room // tasks[group[0]].batch)
        yield from (ordered[start : start + most] for start in range(0, len(ordered), most))


def _positions(joint: Joint) -> int:
    found = 1
    for size in joint.target.space:
        found *= size
    return found


def _check_labels(labels: Tensor | None, classes: int) -> None:
    if labels is None:
        raise ValueError(
            "targets='labels' needs data with whole-numbered labels: give (x, y) batches, or targets='soft'"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"the labels go from {low} to {high}, but B answers {classes} classes: with label spaces that differ, take "
            "targets='soft'"
        )
