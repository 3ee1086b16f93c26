"""What learning tasks one after another came to."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from ...models.atoms import atom_layers
from ...stats import AtomTable

State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Continual:
    """The networks of all tasks, and how well they did after each.

    Row i of `accuracy` is what was found once task i was learnt, column j the test images of task j, NaN where j was
    not learnt yet (it has no last layer). `accuracy` is told the task of an image (task-incremental);
    `class_accuracy` is not (class-incremental): every task's network answers, and the one that is surest, by the odds
    of its largest softmax output, has its way.
    """

    method: str
    template: nn.Module
    head: str  # the name of the last layer, of which every task has its own
    shared: State  # what the networks of all tasks have in common
    own: tuple[State, ...]  # and what is each task's own
    accuracy: Tensor  # (tasks, tasks)
    class_accuracy: Tensor  # (tasks, tasks)

    def __len__(self) -> int:
        return len(self.own)

    def __repr__(self) -> str:
        reached = (
            f", mean accuracy {float(self.accuracy[len(self) - 1].nanmean()):.3f} after the last" if self.own else ""
        )
        return f"<Continual by {self.method}: {len(self)} tasks{reached}>"

    def model(self, task: int) -> nn.Module:
        """The network of one task as a module of its own, in evaluation mode."""
        if not -len(self) <= task < len(self):
            raise IndexError(f"task {task} of {len(self)}")
        made = copy.deepcopy(self.template)
        own = self.own[task]
        replace_head(made, self.head, len(own[f"{self.head}.weight"]))
        made.load_state_dict({**self.shared, **own})
        return made.eval()

    def atoms(self) -> AtomTable:
        """The atoms of every task, one row a task: `.cosines()` says how alike the tasks are."""
        self._check_atoms()
        return AtomTable.of([{n: s[f"{n}.atoms"].cpu() for n in atom_layers(self.template)} for s in self.own])

    @property
    def coefficients(self) -> State:
        """Those that all tasks share, by layer."""
        self._check_atoms()
        return {name: self.shared[f"{name}.coefficients"] for name in atom_layers(self.template)}

    def _check_atoms(self) -> None:
        if self.method != "atoms":
            raise ValueError(f"method {self.method!r} shares no coefficients: atoms can be compared with 'atoms' alone")

    @property
    def forgetting(self) -> float:
        """Mean over all tasks but the last of the best accuracy before the last task less that after it."""
        return _forgetting(self.accuracy)

    @property
    def class_forgetting(self) -> float:
        """The same where the task of an image is not told; not 0 with atoms either, since more networks compete."""
        return _forgetting(self.class_accuracy)


def _forgetting(accuracy: Tensor) -> float:
    if len(accuracy) < 2:
        raise ValueError("one task alone forgets nothing: forgetting needs two")
    before, final = accuracy[:-1, :-1], accuracy[-1, :-1]
    best = before.masked_fill(before.isnan(), -torch.inf).amax(0)
    return float((best - final).mean())


def replace_head(model: nn.Module, name: str, classes: int) -> nn.Linear:
    """Put a last layer for so many classes in place, whose numbers are yet to be set."""
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    size = {"in_features": old.in_features, "out_features": classes, "bias": old.bias is not None}
    new = skip_init(nn.Linear, **size, device=old.weight.device, dtype=old.weight.dtype)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
    return new
