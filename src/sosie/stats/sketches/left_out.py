"""Sums over buckets with each bucket left out in turn, brought to the number of terms that there were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sums(terms: Tensor) -> Tensor:
    """(M, …): of one term a bucket (M, …)."""
    return len(terms) / (len(terms) - 1) * (terms.sum(0) - terms)


def sums_of_pairs(one: Tensor, other: Tensor) -> Tensor:
    """(M,): of the products of two kernels (M, M)."""
    products = one * other
    return _of_pairs(products.sum(1), products.diagonal())


def all_sums_of_pairs(own: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """(M, A, B): the same for each of A kernels with each of B."""
    rows = torch.stack(list(own), 1) @ torch.stack(list(other), 2)  # (M, A, M) @ (M, M, B)
    a, b = (torch.stack([gram.diagonal() for gram in side], 1) for side in (own, other))
    return _of_pairs(rows, a[:, :, None] * b[:, None, :])


def _of_pairs(rows: Tensor, diagonal: Tensor) -> Tensor:
    """From the sums over the second bucket of each pair: beside the diagonal a bucket takes two such sums with it."""
    m, beside = len(rows), rows - diagonal
    return m / (m - 2) * (beside.sum(0) - 2 * beside) + sums(diagonal)
