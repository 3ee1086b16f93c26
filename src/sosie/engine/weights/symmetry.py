"""Networks with their neurons in another order, and whether they still compute the same."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...capture import as_found
from ...capture.axes import Axis, WeightAxes, named_weights, order_of, weight_axes
from ...capture.outputs import tensors_in
from ...models.specification import seeded

# Of how far answers to different inputs lie apart: rounding of sums in another order stays far below.
SAME = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE = 5e-2  # in fewer digits
CHANGES = "another order of it changes what the model computes"

Orders = Mapping[Axis, Tensor]


def reordered(tensor: Tensor, axes: tuple[Axis, ...], orders: Orders) -> Tensor:
    """A tensor with each axis in its order."""
    for i, axis in enumerate(axes):
        order = order_of(axis, orders)
        if not torch.equal(order, torch.arange(len(order))):
            tensor = tensor.index_select(i, order.to(tensor.device))
    return tensor


@torch.no_grad()
def with_orders(model: nn.Module, axes: WeightAxes, orders: Orders) -> nn.Module:
    """A copy of a model with its neurons in these orders."""
    changed = copy.deepcopy(model)
    for name, tensor in named_weights(changed).items():
        tensor.copy_(reordered(tensor.clone(), axes.of[name], orders))
    return changed


@dataclass(frozen=True)
class Change:
    """The largest difference of two models' outputs, over how far one's answers to different inputs lie apart."""

    share: float
    limit: float  # what rounding may make it
    blind: bool  # all inputs got the same answer, which then says little

    @property
    def is_none(self) -> bool:
        return self.share <= self.limit


def function_change(model: nn.Module, other: nn.Module, example: Tensor) -> Change:
    """How differently two models answer; in float64 where their forwards can."""
    try:
        found = [_outputs(copy.deepcopy(each).double(), _as_double(example)) for each in (model, other)]
    except (RuntimeError, TypeError):  # some forwards insist on float32
        found = [_outputs(each, example) for each in (model, other)]
    spread, difference, limit = 0.0, 0.0, SAME[torch.float64]
    for one, another in zip(*found, strict=True):
        if not bool(torch.isfinite(one).all()):
            raise ValueError("the model's answer to random inputs is not finite: give example= as it would be used")
        several = one.ndim > 0 and len(one) > 1
        spread = max(spread, float((one - one.mean(0) if several else one).abs().max()))
        difference = max(difference, float((one - another).abs().max()))
        limit = max(limit, SAME.get(one.dtype, COARSE))
    return Change(difference / spread if spread else difference, limit, spread == 0)


def _outputs(model: nn.Module, example: Tensor) -> list[Tensor]:
    with as_found(model), seeded(0):
        return [tensor for tensor in tensors_in(model(example)) if tensor.is_floating_point()]


def _as_double(example: Tensor) -> Tensor:
    return example.double() if example.is_floating_point() else example


def checked_axes(model: nn.Module, example: Tensor, *, seed: int = 0) -> WeightAxes:
    """The groups of a model's axes, each tried: neurons in a random order must leave what it computes as it is.

    A group that does not is fixed, and named.
    """
    axes = weight_axes(model, example)
    orders = random_orders(axes, torch.Generator().manual_seed(seed))

    def changes(groups: Iterable[Axis]) -> bool:
        other = with_orders(model, axes, {axis: orders[axis] for axis in groups})
        return not function_change(model, other, example).is_none

    if not changes(axes.groups.values()):
        return axes
    axes = axes.without({name: CHANGES for name, axis in axes.groups.items() if changes([axis])})
    if changes(axes.groups.values()):
        raise ValueError("orders of neurons that change nothing one by one do together: this model cannot be matched")
    return axes


def random_orders(axes: WeightAxes, generator: torch.Generator) -> dict[Axis, Tensor]:
    """Every group in a random order."""
    return {axis: torch.randperm(axis.size, generator=generator) for axis in axes.groups.values()}
