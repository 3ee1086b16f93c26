"""Measures, one file a family; each is a function of a view with declared facts."""

from .correlations import cca_r2, mean_cca, pwcca, svcca
from .define import MEASURES, Measure, UnknownMeasure, define, find, settled
from .dissimilarities import rsa
from .geometry import (
    concentricity_difference,
    imd,
    intrinsic_dimension_difference,
    magnitude_difference,
    rtd,
    uniformity_difference,
)
from .kernels import debiased_cka, kernel_alignment, linear_cka, rbf_cka
from .neighbours import cycle_knn, jaccard, lcs_knn, mutual_knn, rank_similarity, second_order_cosine
from .shape import normalized_bures, procrustes_angle, procrustes_distance, regression_r2

__all__ = [
    "MEASURES",
    "Measure",
    "UnknownMeasure",
    "cca_r2",
    "concentricity_difference",
    "cycle_knn",
    "debiased_cka",
    "define",
    "find",
    "imd",
    "intrinsic_dimension_difference",
    "jaccard",
    "kernel_alignment",
    "lcs_knn",
    "linear_cka",
    "magnitude_difference",
    "mean_cca",
    "mutual_knn",
    "normalized_bures",
    "procrustes_angle",
    "procrustes_distance",
    "pwcca",
    "rank_similarity",
    "rbf_cka",
    "regression_r2",
    "rsa",
    "rtd",
    "second_order_cosine",
    "settled",
    "svcca",
    "uniformity_difference",
]
