"""What happened in training, joint by joint: history, the best layer so far, and who has to stop."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...linalg import Affine, JointMoments, explained
from ...measures import similarity_at_joint
from ...measures.joint import scatter
from .losses import Lost
from .stack import JointStack
from .task_loss import TaskLoss

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

    def begin(self, start: Lost, validation: Lost | None) -> None:
        self._validated = validation is not None
        losses = start.loss
        for k in (~losses.isfinite()).nonzero().flatten().tolist():
            self._fail(k, 0, 0, float(losses[k]))
        self._record(0, start, validation)

    def end_of(self, epoch: int, steps: Sequence[Lost], counts: Sequence[int], validation: Lost | None) -> None:
        """The only place where the device is waited for."""
        table = torch.stack([lost.loss for lost in steps]).double().cpu()  # (steps, K)
        intact = self.stack.finite().cpu()
        for k in self.going.nonzero().flatten().tolist():
            bad = (~table[:, k].isfinite()).nonzero().flatten().tolist()
            if bad:
                self._fail(k, epoch, bad[0] + 1, float(table[bad[0], k]))
            elif not intact[k]:
                self._fail(k, epoch, len(steps), float("nan"))
        self._record(epoch, Lost.mean(steps, counts), validation)
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

    def _record(self, epoch: int, training: Lost, validation: Lost | None) -> None:
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
