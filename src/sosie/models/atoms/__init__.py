"""Convolutions made of a few filter atoms and coefficients that models may share."""

from .decompose import Decomposed, decompose, recompose
from .layer import AtomConv2d
from .parts import Part, atom_layers, freeze, load_atoms, share_coefficients, with_atoms

__all__ = [
    "AtomConv2d",
    "Decomposed",
    "Part",
    "atom_layers",
    "decompose",
    "freeze",
    "load_atoms",
    "recompose",
    "share_coefficients",
    "with_atoms",
]
