"""Layers of weights as columns of a penalty: no data and no hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...capture import SiteError, select, unwrap, weighted_layers
from ...capture.names import Names
from ...linalg import chain_products
from ...measures import Measure
from ...models.atoms import AtomConv2d, check_shared
from ...stats import Atoms, LinearMaps, TensorPair, linear_maps


def layers_of(model: nn.Module, measure: Measure, sites: Any) -> dict[str, nn.Module]:
    """The layers that a measure of weights compares, by name: the chosen ones that have what it reads."""
    names = Names.of(unwrap(model))
    kind = _kind(measure)
    chosen = list(names.unique() if sites is None else select(model, sites))
    found = {name: names.by_name[name] for name in chosen if _fits(names.by_name[name], kind)}
    if not found or (sites is not None and len(found) < len(chosen)):
        wrong = next((name for name in chosen if name not in found), "") if sites is not None else ""
        raise SiteError(
            f"{measure.name} needs layers of type {kind.__name__}; "
            + (f"site {wrong!r} is none" if wrong else f"there are none in this {type(model).__name__}")
        )
    if kind is nn.Linear:
        _check_chain(model, names, measure)
    return found


def check_atoms(models: Sequence[nn.Module], measure: Measure) -> None:
    """Refuse a cosine of atoms between models whose coefficients differ: it would pull at numbers without meaning."""
    if issubclass(measure.reads, Atoms) and "linear" not in measure.invariant:
        check_shared([(f"model {k}", unwrap(model)) for k, model in enumerate(models)])


def columns_of(model: nn.Module, measure: Measure, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What the measure reads of each layer, in float64; gradients flow."""
    if issubclass(measure.reads, LinearMaps):
        chain = list(_linear_layers(model).values())
        products = chain_products([layer.weight.mT.double() for layer in chain])
        at = {id(layer): product for layer, product in zip(chain, products, strict=True)}
        return {name: at[id(layer)] for name, layer in layers.items()}
    if issubclass(measure.reads, Atoms):
        return {name: _parameter(layer, "atoms").flatten(1)[None].double() for name, layer in layers.items()}
    return {name: _parameter(layer, "weight").double() for name, layer in layers.items()}


def value_of(measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    """Of two columns."""
    if issubclass(measure.reads, LinearMaps):
        return measure(linear_maps(x, y, measure.reads))
    if issubclass(measure.reads, Atoms):
        return measure(Atoms(x, y)).squeeze()
    return measure(TensorPair(x, y))


def _kind(measure: Measure) -> type[nn.Module]:
    if issubclass(measure.reads, LinearMaps):
        return nn.Linear
    return AtomConv2d if issubclass(measure.reads, Atoms) else nn.Module


def _fits(module: nn.Module, kind: type[nn.Module]) -> bool:
    if kind is not nn.Module:
        return isinstance(module, kind)
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    names = Names.of(unwrap(model))
    return {name: layer for name, layer in names.unique().items() if isinstance(layer, nn.Linear)}


def _check_chain(model: nn.Module, names: Names, measure: Measure) -> None:
    others = [name for name in weighted_layers(model) if name != "." and not isinstance(names.by_name[name], nn.Linear)]
    if others:
        raise SiteError(
            f"{measure.name} as a penalty takes chains of Linear layers; {others[0]!r} is a "
            f"{type(names.by_name[others[0]]).__name__}: take weight_cosine, or a measure of activations"
        )
    with torch.no_grad():
        chain_products([layer.weight.mT for layer in _linear_layers(model).values()])


def _parameter(layer: nn.Module, name: str) -> Tensor:
    found = getattr(layer, name)
    assert isinstance(found, Tensor)
    return found
