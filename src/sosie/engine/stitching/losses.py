"""What each of many joints loses on a batch: they are folded into the inputs of B's upper part, which runs once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...capture.structure import rebuild
from ...linalg import centred_grams, centred_rows, widened
from ...measures import linear_cka
from ...models.joint import Form
from ...stats import Alignment
from .halves import Half, answer_of
from .kept import Kept
from .stack import JointStack
from .task_loss import TaskLoss

UserLoss = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Lost:
    """Of every joint on one batch."""

    loss: Tensor  # (K,) with penalties
    cross_entropy: Tensor | None  # (K,) to B's soft answers; None where B is no classifier

    def detached(self) -> Lost:
        return Lost(self.loss.detach(), None if self.cross_entropy is None else self.cross_entropy.detach())

    @classmethod
    def mean(cls, parts: Sequence[Lost], counts: Sequence[int]) -> Lost:
        """Over batches of so many inputs."""
        shares = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        crosses = [part.cross_entropy for part in parts if part.cross_entropy is not None]

        def over(found: list[Tensor]) -> Tensor:
            return shares @ torch.stack(found).double().cpu()  # the device is waited for here

        return cls(over([part.loss for part in parts]), over(crosses) if crosses else None)


class Objective:
    """The loss of K joints, each by its own options."""

    def __init__(self, tasks: Sequence[TaskLoss], upper: Half, form: Form, user: UserLoss | None, like: Tensor) -> None:
        def per_joint(name: str) -> Tensor:
            return torch.tensor([getattr(task, name) for task in tasks], dtype=like.dtype, device=like.device)

        self._upper, self._form, self._user = upper, form, user
        self._l1 = per_joint("l1") if any(task.l1 for task in tasks) else None
        penalised = [k for k, task in enumerate(tasks) if task.cka]
        self._with_cka = torch.tensor(penalised, device=like.device) if penalised else None  # made once: no waiting
        self._cka = per_joint("cka")[penalised]
        self._by_labels = torch.tensor([task.targets == "labels" for task in tasks], device=like.device)
        self._labelled = user is None and any(task.targets == "labels" for task in tasks)
        self._autocast = tasks[0].autocast
        self.channels_last = True  # until B's upper part turns out not to run on maps laid out so

    def __call__(self, stack: JointStack, kept: Kept, index: Tensor) -> Lost:
        """Of the inputs at `index`, (1, m) or (K, m)."""
        weight = stack.weight()
        rows = kept.rows_a(index)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self._autocast):
            mapped = _mapped(rows.flatten(1, 2), weight, stack.bias)
            outputs = self._answers(mapped, rows.shape, kept, index)
        loss, cross = self._task(outputs.unflatten(0, (stack.count, index.shape[1])), kept, index)
        if self._l1 is not None:
            loss = loss + self._l1 * weight.abs().sum((1, 2))
        if self._with_cka is not None:
            rows_b = kept.rows_b(index if len(index) == 1 else index[self._with_cka]).flatten(1, 2)
            penalty = self._cka * cka_of_rows(mapped[self._with_cka], rows_b)
            loss = loss.index_add(0, self._with_cka, penalty.to(loss))
        return Lost(loss, cross)

    def _answers(self, mapped: Tensor, shape: torch.Size, kept: Kept, index: Tensor) -> Tensor:
        """(K m, …) from the rows (K, m positions, q)."""
        activation = unfolded(mapped, shape[1], self._form)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if self._upper.cut.needs_input:
            times = len(mapped) // len(index)
            args, kwargs = rebuild(lambda leaf: _repeated(leaf, times), self._upper.call(kept.inputs(index)))
        return answer_of(
            self._upper.cut.task(activation if self.channels_last else activation.contiguous(), *args, **kwargs)
        )

    def _task(self, outputs: Tensor, kept: Kept, index: Tensor) -> tuple[Tensor, Tensor | None]:
        cross = None
        if kept.soft is not None:
            logarithms = outputs.to(kept.soft.dtype).log_softmax(-1)
            cross = -(kept.soft[index] * logarithms).sum(-1).mean(-1)
        if self._user is not None:
            return self._by_user(self._user, outputs, kept, index), cross
        assert cross is not None
        if not self._labelled:
            return cross, cross
        assert kept.labels is not None
        chosen = kept.labels[index].expand(len(outputs), -1)[..., None]
        return torch.where(self._by_labels, -logarithms.gather(-1, chosen).mean((1, 2)), cross), cross

    def _by_user(self, loss: UserLoss, outputs: Tensor, kept: Kept, index: Tensor) -> Tensor:
        batches = [kept.inputs(row) for row in index]
        found = [loss(own, batches[k if len(batches) > 1 else 0]) for k, own in enumerate(outputs)]
        for value in found:
            if not isinstance(value, Tensor) or value.ndim or (torch.is_grad_enabled() and not value.requires_grad):
                got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"loss(outputs, batch) must return a single number made from the outputs {tuple(outputs.shape[1:])}"
                    f" as a tensor without dimensions, got {got}"
                )
        return torch.stack(found)

    @torch.no_grad()
    def settle(self, stack: JointStack, kept: Kept, index: Tensor) -> None:
        """Find out whether B's upper part runs on maps laid out channels last; `x.view(…)` in it may not."""
        try:
            self(stack, kept, index)
        except RuntimeError:
            self.channels_last = False


def _mapped(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(K, r, q) from the rows (1 or K, r, p)."""
    rows = rows.expand(len(weight), -1, -1)
    return torch.baddbmm(bias[:, None].to(rows.dtype), rows, weight.transpose(1, 2).to(rows.dtype))


def unfolded(mapped: Tensor, inputs: int, form: Form) -> Tensor:
    """The rows (K, inputs × positions, q) as K × inputs activations of a form; maps are laid out channels last."""
    first = len(mapped) * inputs
    width = mapped.shape[-1]
    if not form.space:
        return mapped.reshape(first, width)
    if form.tokens and len(form.space) == 1:
        return mapped.reshape(first, -1, width)  # texts need not be as long as the first
    activation = mapped.reshape(first, *form.space, width)
    return activation if form.tokens else activation.movedim(-1, 1)


def cka_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """(J,) linear CKA of rows x (J, n, p) and y (1 or J, n, q), in float32 at least; differentiable."""
    with torch.autocast(x.device.type, enabled=False):
        x, y = (_unit_scale(rows) for rows in (x, y))
        if x.shape[1] < max(x.shape[2], y.shape[2]):
            of_x, of_y = centred_grams(x), centred_grams(y)
            xx, yy, xy = (part.sum((1, 2)) for part in (of_x.square(), of_y.square(), of_x * of_y))
        else:
            x, y = centred_rows(x), centred_rows(y)
            pairs = (x, x), (y, y), (x, y)
            xx, yy, xy = ((one.transpose(1, 2) @ other).square().sum((1, 2)) for one, other in pairs)
        return linear_cka(Alignment(xx, yy, xy))


def _unit_scale(rows: Tensor) -> Tensor:
    """Over their size: CKA does not see it, and fourth powers of large activations overflow."""
    size = centred_rows(rows.detach()).square().sum((1, 2), keepdim=True).sqrt()
    return widened(rows) / size


def _repeated(leaf: Any, times: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.repeat(times, *[1] * (leaf.ndim - 1))
    return leaf * times if isinstance(leaf, list) else leaf
