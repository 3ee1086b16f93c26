"""Models that are not made of modules, such as an ONNX graph: a module stands for each of their named values."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Run(Protocol):
    """One forward: it gives each value, and takes another in its place."""

    def read(self, key: str) -> Tensor: ...
    def replace(self, key: str, tensor: Tensor) -> None: ...


class NotSaved:
    """The answer of a model whose answer was not saved."""


class Part(nn.Module):
    """A name that others begin with and that has no value of its own. It is never called."""


class Value(nn.Module):
    """A named value, which its model calls once in each forward, so that hooks see it and may replace it."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, run: Run) -> Tensor:
        visit(self, run)
        return run.read(self.key)


class Between(Value, nn.Identity):
    """A value that is no layer's: it can be asked for, but is not among the default sites."""

    forward = Value.forward  # type: ignore[assignment]


class ValueModel(nn.Module):
    """A model of named values. It has no weights to show, casts what it is given to the types that it wants, and runs
    on the CPU.
    """

    own_dtype = torch.float32  # the type of most of its numbers
    batch_size: int | None = None  # the only one that it takes; None: any

    def add(self, name: str, value: nn.Module) -> None:
        """Put a value in its place: "layer1.0" is "0" inside "layer1"."""
        home: nn.Module = self
        *above, last = name.split(".")
        for piece in above:
            home = home._modules.setdefault(piece, Part()) or home
        if (before := home._modules.get(last)) is not None:
            value._modules.update(before._modules)
        home._modules[last] = value

    def watched(self) -> list[str]:
        """The keys of the values that somebody wants to see."""
        return [module.key for module in self.modules() if isinstance(module, Value) and is_watched(module)]


def is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def visit(module: nn.Module, run: Run) -> None:
    """Call the values inside that somebody watches, in their order."""
    for child in module.children():
        if not (isinstance(child, Value) and is_watched(child)):
            visit(child, run)
            continue
        tensor: Any = child(run)
        if tensor is not run.read(child.key):
            run.replace(child.key, tensor)


def value_model_in(model: nn.Module) -> ValueModel | None:
    """The model of values that this is, or that it wraps."""
    return next((module for module in model.modules() if isinstance(module, ValueModel)), None)
