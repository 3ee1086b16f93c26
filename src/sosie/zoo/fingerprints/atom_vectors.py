"""Kind "atoms": the filter atoms of each layer; only models that share their coefficients have comparable ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...capture import unwrap
from ...engine.digest import digest_of
from ...models import atom_layers
from .projection import project


def atom_vectors(model: nn.Module, size: int, seed: int) -> tuple[str, dict[str, Tensor]]:
    """The digest of the coefficients, and of each layer the atoms as one vector (size,) of length 1."""
    layers = atom_layers(unwrap(model))
    if not layers:
        raise ValueError("the model has no layer of filter atoms")
    found = {}
    for name, layer in layers.items():
        atoms = layer.atoms.detach().cpu().double().flatten()
        largest = atoms.abs().max()
        if not bool(torch.isfinite(largest)) or not bool(largest > 0):
            raise ValueError(f"the atoms of {name} are {'all 0' if not bool(largest) else 'NaN or infinite'}")
        # By the largest first: the squares of very small or large numbers are 0 or infinite.
        found[name] = project((atoms / largest)[None], size, seed)[0]
    shared = {name: (tuple(layer.atoms.shape), layer.coefficients.detach().float()) for name, layer in layers.items()}
    return digest_of(shared), found
