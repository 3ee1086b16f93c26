"""Whether models in atom form share their coefficients, without which a cosine of atoms says nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .layer import AtomConv2d
from .parts import atom_layers

SHARED = 1e-6  # of their norm: more is not the rounding of a copy

Named = tuple[str, AtomConv2d]


def check_shared(named: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise unless the coefficients of every model are those of the first, to 1e-6 of their norm, layer by layer."""
    first_name, first = named[0][0], atom_layers(named[0][1])
    for name, model in named[1:]:
        layers = atom_layers(model)
        common = [layer for layer in first if layer in layers]
        if not common:
            raise ValueError(f"{first_name} and {name} have no layer of atoms of one name")
        for check in (_check_shapes, _check_values):
            for layer in common:
                check(layer, (first_name, first[layer]), (name, layers[layer]))


def _check_shapes(where: str, a: Named, b: Named) -> None:
    (name_a, layer_a), (name_b, layer_b) = a, b
    if layer_a.atoms.shape != layer_b.atoms.shape:
        raise ValueError(
            f"{where}: {name_a} has atoms of {_by(layer_a)} and {name_b} of {_by(layer_b)} (number × height × width); "
            "to be compared entry by entry they must be alike"
        )
    x, y = layer_a.coefficients, layer_b.coefficients
    if x.shape != y.shape:
        raise ValueError(
            f"{where}: coefficients of {tuple(x.shape)} (outputs, inputs, atoms) in {name_a} and {tuple(y.shape)} in "
            f"{name_b} are not shared; joint='polar' compares layers of any number of channels"
        )


def _check_values(where: str, a: Named, b: Named) -> None:
    (name_a, layer_a), (name_b, layer_b) = a, b
    x, y = layer_a.coefficients, layer_b.coefficients
    if x is y or x.data_ptr() == y.data_ptr():
        return
    u, v = x.detach().double(), y.detach().to(x.device).double()
    size, apart = float(u.norm()), float((u - v).norm())
    if apart > SHARED * size:
        raise ValueError(
            f"{where}: {name_a} and {name_b} do not share their coefficients: these differ by {apart / size:.2g} of "
            f"their norm (more than {SHARED:g}), so atom i of one is not atom i of the other and their cosine would "
            "mean nothing. share_coefficients makes them one tensor; compare_weights with joint=9, say, decomposes the "
            "models together first"
            if size
            else f"{where}: all coefficients of {name_a} are 0"
        )


def _by(layer: AtomConv2d) -> str:
    return " × ".join(map(str, layer.atoms.shape))
