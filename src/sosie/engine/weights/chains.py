"""Plain chains of dense layers: their maps are products of matrices, and need no forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...capture import select
from ...results import Side

# Layers of a chain that leave its product as it is.
PASSED = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.CELU, nn.SELU, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Mish, nn.PReLU, nn.RReLU, nn.Identity, nn.Dropout, nn.Flatten,
    nn.AlphaDropout,
)  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """Dense layers one after the other, and at which of them (counted from 1) there is a site."""

    names: tuple[str, ...]
    layers: tuple[nn.Linear, ...]
    sites: tuple[tuple[str, int], ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for chains that can be stacked."""
        return tuple(tuple(layer.weight.shape) for layer in self.layers), tuple(depth for _, depth in self.sites)

    @property
    def depths(self) -> list[int]:
        """At which there are sites, each once: the whole network and its last layer are one."""
        return sorted({depth for _, depth in self.sites})

    @property
    def index(self) -> list[int]:
        """Which of the depths each site is at."""
        return [self.depths.index(depth) for _, depth in self.sites]

    def side(self, name: str) -> Side:
        widths = tuple(self.layers[depth - 1].out_features for _, depth in self.sites)
        return Side(name, tuple(label for label, _ in self.sites), widths, tuple((width,) for width in widths))


def chain_of(model: nn.Module, sites: Any, prepare: Any) -> Chain | None:
    """The chain that a model is, if it is one: an nn.Sequential of dense layers and elementwise activations."""
    if prepare is not None:
        return None
    found = list(_walk("", model))
    layers = [(name, module) for name, module in found if type(module) is nn.Linear]
    if not layers or any(module is None for _, module in found):
        return None
    if len({id(layer) for _, layer in layers}) < len(layers):
        return None  # a layer that is used twice has sites for both calls
    if any(a.out_features != b.in_features for (_, a), (_, b) in itertools.pairwise(layers)):
        return None
    names = tuple(name for name, _ in layers)
    depth = {name: k for k, name in enumerate(names, 1)} | {"": len(names)}
    chosen = None if sites is None else select(model, sites)
    wanted = list(dict.fromkeys([*names, ""]) if chosen is None else chosen)
    if any(name not in depth for name in wanted) or any(w.calls not in (None, {1}) for w in (chosen or {}).values()):
        return None
    # In the order in which they fire, as anywhere else: the model's own output comes last.
    ordered = sorted(wanted, key=lambda name: (depth[name], name == ""))
    label = "." if "output" in dict(model.named_modules()) else "output"
    return Chain(names, tuple(m for _, m in layers), tuple((name or label, depth[name]) for name in ordered))


def _walk(name: str, module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    """The layers in order; None stands for anything that is not known to be one of a chain."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    if type(module) is nn.Sequential and not hooks:
        # Not named_children, which leaves out a layer's second use.
        children = ((f"{name}.{key}" if name else key, child) for key, child in module._modules.items())
        return [each for key, child in children if child is not None for each in _walk(key, child)]
    if hooks or hasattr(module, "parametrizations"):
        return [(name, None)]
    if type(module) is nn.Flatten:
        return [(name, module if (module.start_dim, module.end_dim) == (1, -1) else None)]
    return [(name, module if type(module) in (nn.Linear, *PASSED) else None)]


def stacked(chains: Sequence[Chain], device: Any) -> list[Tensor]:
    """The factors (N, inputs, outputs) of chains with equal shapes, in float64."""
    count = len(chains[0].layers)
    return [
        torch.stack([chain.layers[k].weight.detach().to(device).mT for chain in chains]).double() for k in range(count)
    ]
