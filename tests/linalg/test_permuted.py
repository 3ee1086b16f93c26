"""Moments over all permutations, against all permutations."""

from __future__ import annotations

import itertools

import pytest
import torch

from sosie.linalg import Invariants, permuted_moments


def test_mean_and_variance_over_all_permutations() -> None:
    random = torch.Generator().manual_seed(0)

    def kernel(width: int) -> torch.Tensor:
        x = torch.randn(6, width, generator=random, dtype=torch.float64) ** 3
        x = x - x.mean(0)
        return x @ x.T

    k, l = kernel(2), kernel(3)
    every = torch.stack([(k * l[list(o)][:, list(o)]).sum() for o in itertools.permutations(range(6))])
    of_k, of_l = (Invariants(m.trace(), m.square().sum(), m.diagonal().square().sum()) for m in (k, l))
    mean, variance = permuted_moments(of_k, of_l, 6)
    assert float(mean) == pytest.approx(float(every.mean()), rel=1e-12)
    assert float(variance) == pytest.approx(float(every.var(unbiased=False)), rel=1e-10)
