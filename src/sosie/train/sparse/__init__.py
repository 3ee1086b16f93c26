"""Sparse training: masks that hold, how they are made, grown, loaded and counted."""

from .costs import SparseCost, sparse_cost
from .densities import counts_of, densities_of
from .loading import load_masked
from .making import pruned_masks, random_masks
from .masks import Masks
from .regrow import SET, Regrow, RigL
from .small_weights import Histogram, WeightHistograms, epsilon_sparsity, weight_histogram

__all__ = [
    "SET",
    "Histogram",
    "Masks",
    "Regrow",
    "RigL",
    "SparseCost",
    "WeightHistograms",
    "counts_of",
    "densities_of",
    "epsilon_sparsity",
    "load_masked",
    "pruned_masks",
    "random_masks",
    "sparse_cost",
    "weight_histogram",
]
