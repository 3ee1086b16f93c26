"""Centring, Gram matrices, spectra with a stated tolerance, assignments, fits of one site to another."""

from . import gram_cuda
from .assignment import best_assignment
from .centring import centred, centred_diagonal, double_centred, u_centred, without_diagonal
from .distances import distances
from .fits import FITS, Affine, Fit, JointMoments, explained, find_fit, fit
from .hsic import block_stacks, diagonal_part, gram_stack
from .permuted import Invariants, permuted_moments
from .products import CACHED_ROWS, column_squares, cross_product, row_squares, self_product
from .spectra import RANK_TOLERANCE, Spectrum, inverse_root, nuclear_norm, rank_tolerance, whitening

__all__ = [
    "CACHED_ROWS",
    "FITS",
    "RANK_TOLERANCE",
    "Affine",
    "Fit",
    "Invariants",
    "JointMoments",
    "Spectrum",
    "best_assignment",
    "block_stacks",
    "centred",
    "centred_diagonal",
    "column_squares",
    "cross_product",
    "diagonal_part",
    "distances",
    "double_centred",
    "explained",
    "find_fit",
    "fit",
    "gram_cuda",
    "gram_stack",
    "inverse_root",
    "nuclear_norm",
    "permuted_moments",
    "rank_tolerance",
    "row_squares",
    "self_product",
    "u_centred",
    "whitening",
    "without_diagonal",
]
