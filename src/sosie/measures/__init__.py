"""Measures, one file a family; each is a function of a view with declared facts."""

from .correlations import cca_r2, mean_cca, pwcca, svcca
from .define import MEASURES, Measure, UnknownMeasure, define, find, settled
from .dissimilarities import rsa
from .kernels import debiased_cka, kernel_alignment, linear_cka, rbf_cka
from .matching import (
    aligned_cosine,
    hard_correlation_match,
    permutation_procrustes_distance,
    soft_correlation_match,
    soft_match_distance,
)
from .neighbours import mutual_knn
from .shape import (
    normalized_bures,
    procrustes_angle,
    procrustes_distance,
    raw_procrustes_distance,
    regression_r2,
    shape_angle,
)
from .spectra import bures_distance, eigenspace_overlap, gulp

__all__ = [
    "MEASURES",
    "Measure",
    "UnknownMeasure",
    "aligned_cosine",
    "bures_distance",
    "cca_r2",
    "debiased_cka",
    "define",
    "eigenspace_overlap",
    "find",
    "gulp",
    "hard_correlation_match",
    "kernel_alignment",
    "linear_cka",
    "mean_cca",
    "mutual_knn",
    "normalized_bures",
    "permutation_procrustes_distance",
    "procrustes_angle",
    "procrustes_distance",
    "pwcca",
    "raw_procrustes_distance",
    "rbf_cka",
    "regression_r2",
    "rsa",
    "settled",
    "shape_angle",
    "soft_correlation_match",
    "soft_match_distance",
    "svcca",
]
