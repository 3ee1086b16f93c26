"""Similarity at the joint from moments against the same measures on the mapped rows."""

from __future__ import annotations

import pytest
import torch
from paired import correlated_rows

from sosie.linalg import Affine, fit
from sosie.measures import find
from sosie.stats import Moments
from sosie.stitching.joint import similarity_at_joint

NAMES = [
    "linear_cka",
    "kernel_alignment",
    "mean_cca",
    "cca_r2",
    "svcca",
    "svcca(keep=0.8)",
    "regression_r2",
    "normalized_bures",
    "hard_correlation_match",
]


@pytest.mark.parametrize("name", ["least_squares", "reduced_rank(k=2)", "procrustes", "lasso(alpha=0.1)"])
def test_similarity_at_the_joint_is_that_of_the_mapped_rows(name: str) -> None:
    a, b = correlated_rows(n=90)
    moments = Moments.of(a[:50], b[:50]).merge(Moments.of(a[50:], b[50:])).joint()
    found = fit(name, moments)
    values = similarity_at_joint(moments, found, NAMES)
    for measure in NAMES:
        assert values[measure] == pytest.approx(float(find(measure).of(found(a), b)), abs=1e-9), measure


def test_regression_r2_of_a_least_squares_map_is_that_of_the_fit() -> None:
    a, b = correlated_rows()
    moments = Moments.of(a, b).joint()
    found = fit("least_squares", moments)
    values = similarity_at_joint(moments, found, ["regression_r2"])
    assert values == {"regression_r2": pytest.approx(found.report["r2"])}


def test_what_moments_cannot_give_is_refused_in_words() -> None:
    a, b = correlated_rows()
    moments = Moments.of(a, b).joint()
    found = fit("least_squares", moments)
    for measure in ("debiased_cka", "mutual_knn"):
        with pytest.raises(ValueError, match=f"{measure} reads .*do not supply"):
            similarity_at_joint(moments, found, [measure])
    with pytest.raises(ValueError, match="all of A to a single point"):
        similarity_at_joint(moments, Affine(torch.zeros(5, 7).double(), torch.zeros(5).double()), NAMES)
    with pytest.raises(ValueError, match="need a weight"):
        similarity_at_joint(moments, Affine(torch.zeros(7, 5).double(), torch.zeros(7).double()), NAMES)
