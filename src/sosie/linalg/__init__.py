"""Centring, Gram matrices, spectra with a stated tolerance, assignments."""

from . import gram_cuda
from .assignment import best_assignment
from .centring import centred, centred_diagonal, double_centred, u_centred, without_diagonal
from .hsic import block_stacks, diagonal_part, gram_stack
from .spectra import Spectrum, inverse_root, nuclear_norm, rank_tolerance

__all__ = [
    "Spectrum",
    "best_assignment",
    "block_stacks",
    "centred",
    "centred_diagonal",
    "diagonal_part",
    "double_centred",
    "gram_cuda",
    "gram_stack",
    "inverse_root",
    "nuclear_norm",
    "rank_tolerance",
    "u_centred",
    "without_diagonal",
]
