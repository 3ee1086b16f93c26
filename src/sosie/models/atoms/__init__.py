"""Convolutions made of a few filter atoms and coefficients that models may share."""

from .decompose import (
    Decomposed,
    check_weight,
    decompose,
    recompose,
    relative_error,
    replace_convolutions,
    why_not,
)
from .layer import AtomConv2d, check_count
from .parts import Part, atom_layers, freeze, load_atoms, share_coefficients, with_atoms
from .shared import check_shared

__all__ = [
    "AtomConv2d",
    "Decomposed",
    "Part",
    "atom_layers",
    "check_count",
    "check_shared",
    "check_weight",
    "decompose",
    "freeze",
    "load_atoms",
    "recompose",
    "relative_error",
    "replace_convolutions",
    "share_coefficients",
    "why_not",
    "with_atoms",
]
