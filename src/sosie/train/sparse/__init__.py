"""Sparse training: masks that hold, how they are made, grown, loaded and counted."""

from .costs import Histogram, SparseCost, WeightHistograms, epsilon_sparsity, sparse_cost, weight_histogram
from .making import SET, Regrow, RigL, counts_of, densities_of, pruned_masks, random_masks
from .masks import Masks, load_masked

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
