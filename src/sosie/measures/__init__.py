"""Measures, one file a family; each is a function of a view with declared facts."""

from .correlations import cca_r2, mean_cca, pwcca, svcca
from .define import MEASURES, Measure, UnknownMeasure, define, find, settled
from .dissimilarities import rsa
from .kernels import debiased_cka, kernel_alignment, linear_cka, rbf_cka
from .neighbours import mutual_knn
from .shape import normalized_bures, procrustes_angle, procrustes_distance, regression_r2

__all__ = [
    "MEASURES",
    "Measure",
    "UnknownMeasure",
    "cca_r2",
    "debiased_cka",
    "define",
    "find",
    "kernel_alignment",
    "linear_cka",
    "mean_cca",
    "mutual_knn",
    "normalized_bures",
    "procrustes_angle",
    "procrustes_distance",
    "pwcca",
    "rbf_cka",
    "regression_r2",
    "rsa",
    "settled",
    "svcca",
]
