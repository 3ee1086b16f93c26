"""The two parts of models in atom form: atoms of one's own, coefficients to share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from .decompose import replace_convolutions
from .layer import AtomConv2d, check_count

Part = Literal["atoms", "coefficients"]


def with_atoms(model: nn.Module, atoms: int) -> nn.Module:
    """A copy whose convolutions are made of at most `atoms` atoms each, drawn afresh: a network to train.

    As `decompose` counts them: no layer has more than its kernels have entries, or than there are kernels.
    """
    check_count(atoms)

    def fresh(name: str, layer: nn.Conv2d) -> nn.Module:
        kernels = layer.weight.shape[0] * layer.weight.shape[1]
        return AtomConv2d.like(layer, min(atoms, kernels, layer.weight[0, 0].numel()))

    made, _ = replace_convolutions(model, fresh)
    if not atom_layers(made):
        raise ValueError("the model has no convolution that atoms could stand for")
    return made


def atom_layers(model: nn.Module) -> dict[str, AtomConv2d]:
    """Every layer made of atoms, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, AtomConv2d)}


def freeze(model: nn.Module, part: Part, frozen: bool = True) -> nn.Module:
    """Hold one part of every layer as it is while the model is trained; `frozen=False` lets it go again."""
    if part not in ("atoms", "coefficients"):
        raise ValueError(f"there is no part {part!r} to freeze: 'atoms' or 'coefficients'")
    for layer in _layers(model).values():
        (layer.atoms if part == "atoms" else layer.coefficients).requires_grad_(not frozen)
    return model


def share_coefficients(source: nn.Module, others: Iterable[nn.Module]) -> None:
    """Give models the coefficients of another: the same tensors in memory, so that training one moves all.

    One tensor has one type and one device, so models of another are refused.
    """
    ours = _layers(source)
    for k, model in enumerate(others):
        theirs = _layers(model)
        if missing := sorted(set(ours) ^ set(theirs)):
            raise ValueError(f"model {k} and the source do not both have a layer of atoms called {missing[0]!r}")
        for name, layer in theirs.items():
            if layer.coefficients.shape != ours[name].coefficients.shape:
                raise ValueError(
                    f"{name}: coefficients of {tuple(layer.coefficients.shape)} (outputs, inputs, atoms) cannot be "
                    f"those of the source, {tuple(ours[name].coefficients.shape)}"
                )
            _check_same_place(f"{name} of model {k}", layer.coefficients, ours[name].coefficients)
        for name, layer in theirs.items():
            layer.coefficients = ours[name].coefficients


def load_atoms(model: nn.Module, atoms: Mapping[str, Tensor]) -> nn.Module:
    """Set the atoms of layers by name; the coefficients stay."""
    layers = _layers(model)
    for name, tensor in atoms.items():
        if name not in layers:
            raise ValueError(f"no layer of atoms is called {name!r}; there are {', '.join(layers)}")
        if tensor.shape != layers[name].atoms.shape:
            raise ValueError(f"{name}: atoms of {tuple(tensor.shape)}, the layer has {tuple(layers[name].atoms.shape)}")
    with torch.no_grad():
        for name, tensor in atoms.items():
            layers[name].atoms.copy_(tensor)
    return model


def _check_same_place(where: str, own: Tensor, shared: Tensor) -> None:
    if (own.dtype, own.device) != (shared.dtype, shared.device):
        here, there = (f"{str(each.dtype).removeprefix('torch.')} on {each.device}" for each in (own, shared))
        raise ValueError(
            f"{where} computes in {here}, the source's coefficients are {there}, and they would be one tensor: bring "
            "the models to one type and device first (model.to)"
        )


def _layers(model: nn.Module) -> dict[str, AtomConv2d]:
    found = atom_layers(model)
    if not found:
        raise ValueError("the model has no layer of atoms: decompose(model, m) or with_atoms(model, m) makes them")
    return found
