"""Centring, Gram matrices, spectra with a stated tolerance, assignments, fits of one site to another, groups."""

from . import gram_cuda
from .assignment import best_assignment
from .centring import centred, centred_diagonal, double_centred, u_centred, without_diagonal
from .chains import chain_products, unit
from .clusters import adjusted_rand_index, cluster, clusterings, most_similar
from .dense import cholesky, eigen, eigenvalues, gram_factor, singular, singular_values, threads_for, triangular_inverse
from .distances import distances, squared_distances, upper_triangle
from .fits import FITS, Affine, Fit, JointMoments, explained, find_fit, fit
from .hsic import block_stacks, diagonal_part, gram_stack
from .layer_grams import inner_products, sized_grams
from .live_grams import centred_grams, centred_rows, live_gram, sized_gram, widened
from .permuted import Invariants, permuted_moments
from .products import (
    all_by_torch,
    column_squares,
    cross_product,
    for_numpy,
    product,
    row_squares,
    self_product,
    total_squares,
)
from .spectra import (
    ENOUGH_DIGITS,
    ENOUGH_DIGITS_FLOAT32,
    RANK_TOLERANCE,
    Spectrum,
    inverse_root,
    nuclear_norm,
    rank_tolerance,
    whitening,
)
from .threads import lock_of, once, side_by_side

__all__ = [
    "ENOUGH_DIGITS",
    "ENOUGH_DIGITS_FLOAT32",
    "FITS",
    "RANK_TOLERANCE",
    "Affine",
    "Fit",
    "Invariants",
    "JointMoments",
    "Spectrum",
    "adjusted_rand_index",
    "all_by_torch",
    "best_assignment",
    "block_stacks",
    "centred",
    "centred_diagonal",
    "centred_grams",
    "centred_rows",
    "chain_products",
    "cholesky",
    "cluster",
    "clusterings",
    "column_squares",
    "cross_product",
    "diagonal_part",
    "distances",
    "double_centred",
    "eigen",
    "eigenvalues",
    "explained",
    "find_fit",
    "fit",
    "for_numpy",
    "gram_cuda",
    "gram_factor",
    "gram_stack",
    "inner_products",
    "inverse_root",
    "live_gram",
    "lock_of",
    "most_similar",
    "nuclear_norm",
    "once",
    "permuted_moments",
    "product",
    "rank_tolerance",
    "row_squares",
    "self_product",
    "side_by_side",
    "singular",
    "singular_values",
    "sized_gram",
    "sized_grams",
    "squared_distances",
    "threads_for",
    "total_squares",
    "triangular_inverse",
    "u_centred",
    "unit",
    "upper_triangle",
    "whitening",
    "widened",
    "without_diagonal",
]
