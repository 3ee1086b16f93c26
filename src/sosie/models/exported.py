"""Programs of torch.export as models: with the names of their layers, and as a copy in another type."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.fx.node import map_aggregate


class AsExported(nn.Module):
    """The module of a program of torch.export, which has no mode to set: it runs as it was exported."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program, self.training = program, False

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("the module() of an exported program cannot be copied, the ExportedProgram itself can")


def with_layers(model: Any) -> Any:
    """A program of torch.export as modules with the names of the layers that it was made of; others as they are.

    Of an `ExportedProgram` only: its `module()` no longer says which operation belongs to which layer.
    """
    if isinstance(model, nn.Module):
        made_by_export = isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)  # one that refuses
        return AsExported(model) if made_by_export else model
    return torch.export.unflatten(model) if type(model).__name__ == "ExportedProgram" else model


def copy_in(dtype: torch.dtype, model: nn.Module, own: torch.dtype) -> nn.Module:
    """A copy of a model of type `own` in another type."""
    # The graphs of an exported program name types, and hold tensors without numbers, which cannot be copied.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for part in (module, *getattr(module, "_call_modules", ())):  # of a module that is called several times
            graph = vars(part).get("graph")
            if not isinstance(graph, Graph):
                continue
            memo[id(graph)] = _retyped(graph, own, dtype)
            kept = [*graph.nodes, *map(vars(part).get, ("graph_module", "meta"))]
            kept += [value for node in graph.nodes for value in node.meta.values() if isinstance(value, Tensor)]
            memo |= {id(each): each for each in kept}

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_complex():  # of which `to(dtype)` would keep the real part alone
            return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return copy.deepcopy(model, memo)._apply(converted)


def _retyped(graph: Graph, old: torch.dtype, new: torch.dtype) -> Graph:
    result = copy.deepcopy(graph)
    for node in result.nodes:
        node.args, node.kwargs = (map_aggregate(x, lambda x: new if x is old else x) for x in (node.args, node.kwargs))
    return result
