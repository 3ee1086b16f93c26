"""Measures, one file per family; each is a function of a view with declared facts."""

from .correlations import cca_r2, gaussian_information, mean_cca, pwcca, svcca
from .define import MEASURES, Measure, UnknownMeasure, as_array, define, find, find_all, load_all, snap_to_bounds
from .differences import (
    difference_quantile,
    largest_difference,
    least_row_cosine,
    mismatched_share,
    relative_error,
    row_cosine,
    signal_to_noise,
)
from .dissimilarities import rsa, rsm_norm_difference
from .geometry import (
    concentricity_difference,
    imd,
    intrinsic_dimension_difference,
    magnitude_difference,
    rtd,
    uniformity_difference,
)
from .kernels import (
    debiased_cka,
    deconfounded_cka,
    distance_correlation,
    kernel_alignment,
    laplace_cka,
    linear_cka,
    polynomial_cka,
    rbf_cka,
)
from .matching import (
    aligned_cosine,
    hard_correlation_match,
    permutation_procrustes_distance,
    soft_correlation_match,
    soft_match_distance,
)
from .neighbours import cknna, cycle_knn, jaccard, lcs_knn, mutual_knn, rank_similarity, second_order_cosine
from .outputs import (
    accuracy_difference,
    agreement,
    bad_churn,
    chance_of,
    churn,
    disagreement,
    error_overlap,
    jensen_shannon,
    min_max_normalised_disagreement,
    output_correlation,
    output_rmse,
)
from .prediction import predictivity
from .shape import (
    bures_distance,
    cka_angle,
    eigenspace_overlap,
    gulp,
    hsic,
    normalized_bures,
    procrustes_angle,
    procrustes_distance,
    raw_procrustes_distance,
    regression_r2,
    shape_angle,
    spectral_bures_distance,
)
from .stochastic import (
    crossnobis,
    crossnobis_rsa,
    energy_shape_distance,
    gaussian_shape_distance,
    noise_mahalanobis,
    noise_mahalanobis_rsa,
)
from .transforms import Transform, aligner_of, fit_transform
from .weights import (
    atom_cosine,
    atom_grassmann,
    spectrum_distance,
    stable_rank_difference,
    wcka,
    wcka_uncentred,
    weight_cosine,
    weight_distance,
)
