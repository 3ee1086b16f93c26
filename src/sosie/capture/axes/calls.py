"""One operation of a forward, and what is known of the axes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .algebra import Axis, fix, leaf, unite

PLACE = "positions keep their order"
CONSTANT = "a constant of the forward"
INPUT = "the model's input"
OUTPUT = "the model's output"
ORDINARY = frozenset({PLACE, CONSTANT, INPUT, OUTPUT})  # nothing to report: such axes have no other order


class NotUnderstood(Exception):
    """A rule met something it does not cover: all axes of the operation are then fixed."""


@dataclass
class Known:
    """The axes of every tensor met so far. The tensors are held, so that no number names two of them."""

    axes: dict[int, list[Axis]] = field(default_factory=dict)
    held: dict[int, Tensor] = field(default_factory=dict)
    by_storage: dict[int, list[int]] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> list[Axis]:
        if id(tensor) not in self.axes:  # made outside the forward, and no parameter or buffer
            self.set(tensor, [leaf(size, CONSTANT) for size in tensor.shape])
        return self.axes[id(tensor)]

    def set(self, tensor: Tensor, axes: Sequence[Axis]) -> None:
        if [axis.size for axis in axes] != list(tensor.shape):
            raise NotUnderstood
        if id(tensor) not in self.held:
            self.held[id(tensor)] = tensor
            self.by_storage.setdefault(_storage(tensor), []).append(id(tensor))
        self.axes[id(tensor)] = list(axes)

    def sharing(self, tensor: Tensor) -> list[list[Axis]]:
        """The axes of other tensors that lie in the same memory, where those are not just this one's."""
        own = [axis.found() for axis in self.of(tensor)]
        others = [self.axes[key] for key in self.by_storage[_storage(tensor)] if key != id(tensor)]
        return [axes for axes in others if [axis.found() for axis in axes] != own]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Call:
    """An operation with its arguments by name, what it gave, and the module in which it ran."""

    name: str  # without a trailing underscore: what is written in place reads like any other
    overload: str
    in_place: bool
    pointwise: bool
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]
    where: str

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any, where: str) -> Call:
        names = [argument.name for argument in func._schema.arguments]
        defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        outputs = tuple(out for out in _tensors(output))
        return cls(
            name=func.overloadpacket.__name__.rstrip("_"),
            overload=func._overloadname,
            in_place=bool(func._schema.is_mutable) and any(out is a for out in outputs for a in _tensors([args])),
            pointwise=torch.Tag.pointwise in func.tags,
            arguments={**defaults, **dict(zip(names, args, strict=False)), **kwargs},
            outputs=outputs,
            where=where,
        )

    @property
    def tensors(self) -> list[Tensor]:
        return _tensors(list(self.arguments.values()))

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def __str__(self) -> str:
        return f"{self.name} in {self.where or 'the model itself'}"


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, (list, tuple)):
        return [tensor for each in part for tensor in _tensors(each)]
    return []


def broadcast(known: Known, tensors: Sequence[Tensor], shape: Sequence[int]) -> list[Axis]:
    """The axes of what tensors give entry by entry: those that meet are the same."""
    found: list[Axis | None] = [None] * len(shape)
    for tensor in tensors:
        for i, axis in enumerate(reversed(known.of(tensor)), 1):
            if i > len(shape) or axis.size not in (1, shape[-i]):
                raise NotUnderstood
            if axis.size == 1:
                continue
            if (before := found[-i]) is not None:
                unite(before, axis)
            found[-i] = axis
    return [leaf(size) if axis is None else axis.found() for axis, size in zip(found, shape, strict=True)]


def not_understood(known: Known, call: Call) -> None:
    """Fix every axis of an operation, with its name as the reason."""
    for tensor in call.tensors:
        for axis in known.of(tensor):
            fix(axis, str(call))
    for output in call.outputs:
        known.set(output, [leaf(size, str(call)) for size in output.shape])
