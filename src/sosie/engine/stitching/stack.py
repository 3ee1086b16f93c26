"""Many layers side by side: each has parameters and an optimiser of its own, all are moved by the same operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .starts import Start
from .task_loss import TaskLoss

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam's usual ones


class JointStack:
    """K affine maps (q, p), those of two factors after the others, and Adam, which works entry by entry.

    Factors of different rank are filled up with zeros on both sides: these have no gradient, so stay.
    """

    def __init__(self, tasks: Sequence[TaskLoss], starts: Sequence[Start], like: Tensor) -> None:
        whole = [start for start in starts if start.right is None]
        pairs = [(start.left, start.right) for start in starts if start.right is not None]
        self.count = len(starts)
        self.tensors: list[Tensor] = [torch.stack([start.bias for start in starts])]
        owners = [slice(None)]
        if whole:
            self.tensors.append(torch.stack([start.left for start in whole]))
            owners.append(slice(0, len(whole)))
        if pairs:
            rank = max(left.shape[1] for left, _ in pairs)
            self.tensors.append(torch.stack([_filled(left.T, rank).T for left, _ in pairs]))
            self.tensors.append(torch.stack([_filled(right, rank) for _, right in pairs]))
            owners += [slice(len(whole), None)] * 2
        self._has = bool(whole), bool(pairs)
        wide = torch.promote_types(like.dtype, torch.float32)  # half precision would lose small steps
        self.tensors = [tensor.to(like.device, wide).requires_grad_() for tensor in self.tensors]
        rates = torch.tensor([task.rate for task in tasks], dtype=wide, device=like.device)
        learns_bias = torch.tensor([task.bias for task in tasks], device=like.device)
        self._rates = [_beside(rates[own], tensor) for own, tensor in zip(owners, self.tensors, strict=True)]
        self._rates[0] = self._rates[0] * _beside(learns_bias, self.tensors[0])
        self._owners = owners
        self._first = [torch.zeros_like(tensor) for tensor in self.tensors]
        self._second = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.steps = 0

    @property
    def bias(self) -> Tensor:
        """(K, q)."""
        return self.tensors[0]

    def weight(self) -> Tensor:
        """(K, q, p)."""
        return _weight(self.tensors, self._has)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], factor: float) -> None:
        """One step of Adam at `factor` × each joint's rate; one that is no longer finite spoils no other."""
        self.steps += 1
        first_share, second_share = 1 - BETA_1**self.steps, 1 - BETA_2**self.steps
        for k, gradient in enumerate(gradients):
            first, second, tensor = self._first[k], self._second[k], self.tensors[k]
            first.lerp_(gradient, 1 - BETA_1)
            second.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
            size = (second.sqrt() / second_share**0.5).add_(EPSILON)
            tensor.sub_(self._rates[k] * (factor / first_share) * first / size)

    def state(self) -> list[Tensor]:
        """A copy of all parameters."""
        return [tensor.detach().clone() for tensor in self.tensors]

    def mixed(self, chosen: Tensor, one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
        """The state of `one` for the joints that are chosen, else that of the other."""
        return [
            torch.where(_beside(chosen[own], left), left, right)
            for own, left, right in zip(self._owners, one, other, strict=True)
        ]

    def maps(self, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The weights (K, q, p) and biases (K, q) of a state, in float64 on the CPU; one copy from the device each."""
        wide = [tensor.detach().double() for tensor in state]
        return _weight(wide, self._has).cpu(), wide[0].cpu()

    def finite(self) -> Tensor:
        """(K,): whose parameters are all finite."""
        found = self.bias.isfinite().all(1)
        for own, tensor in list(zip(self._owners, self.tensors, strict=True))[1:]:
            found[own] &= tensor.isfinite().all(2).all(1)
        return found


def _weight(tensors: Sequence[Tensor], has: tuple[bool, bool]) -> Tensor:
    whole, pairs = has
    if not pairs:
        return tensors[1]
    products = torch.bmm(tensors[-2], tensors[-1])
    return torch.cat([tensors[1], products]) if whole else products


def _filled(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])])


def _beside(per_joint: Tensor, tensor: Tensor) -> Tensor:
    """(K,) in a shape that broadcasts with (K, …)."""
    return per_joint.view(-1, *[1] * (tensor.ndim - 1))
