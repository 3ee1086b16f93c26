"""Measures, one file a family; each is a function of a view with declared facts."""

from .correlations import cca_r2, mean_cca, pwcca, svcca
from .define import MEASURES, Measure, UnknownMeasure, define, find, settled
from .dissimilarities import rsa
from .kernels import debiased_cka, kernel_alignment, linear_cka, rbf_cka
from .neighbours import mutual_knn
from .output_chance import Chance, chance_of
from .outputs import (
    accuracy_difference,
    agreement,
    bad_churn,
    churn,
    disagreement,
    error_overlap,
    jensen_shannon,
    min_max_normalised_disagreement,
    output_correlation,
    output_rmse,
)
from .shape import normalized_bures, procrustes_angle, procrustes_distance, regression_r2

__all__ = [
    "MEASURES",
    "Chance",
    "Measure",
    "UnknownMeasure",
    "accuracy_difference",
    "agreement",
    "bad_churn",
    "cca_r2",
    "chance_of",
    "churn",
    "debiased_cka",
    "define",
    "disagreement",
    "error_overlap",
    "find",
    "jensen_shannon",
    "kernel_alignment",
    "linear_cka",
    "mean_cca",
    "min_max_normalised_disagreement",
    "mutual_knn",
    "normalized_bures",
    "output_correlation",
    "output_rmse",
    "procrustes_angle",
    "procrustes_distance",
    "pwcca",
    "rbf_cka",
    "regression_r2",
    "rsa",
    "settled",
    "svcca",
]
