"""Factorisations of dense matrices: on a CPU and without gradients by NumPy, small ones on one core."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from .products import for_numpy
from .threads import one_thread

SMALL = 1024  # columns up to which more cores do not make it faster


def eigenvalues(matrix: Tensor) -> Tensor:
    """Ascending, of a symmetric matrix."""
    if not for_numpy(matrix):
        return torch.linalg.eigvalsh(matrix)
    with threads_for(matrix):
        return torch.from_numpy(np.linalg.eigvalsh(matrix.numpy()))


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of a symmetric matrix."""
    if not for_numpy(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors
    with threads_for(matrix):
        found = np.linalg.eigh(matrix.numpy())
    return torch.from_numpy(found.eigenvalues), torch.from_numpy(found.eigenvectors)


def singular_values(matrix: Tensor) -> Tensor:
    """Descending."""
    if not for_numpy(matrix):
        return torch.linalg.svdvals(matrix)
    with threads_for(matrix):
        return torch.from_numpy(np.linalg.svd(matrix.numpy(), compute_uv=False))


def singular(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (p, k), σ (k,) descending and Vᵀ (k, q) with k = min(p, q)."""
    if not for_numpy(matrix):
        u, sizes, vt = torch.linalg.svd(matrix, full_matrices=False)
        return u, sizes, vt
    with threads_for(matrix):
        found = np.linalg.svd(matrix.numpy(), full_matrices=False)
    return torch.from_numpy(found.U), torch.from_numpy(found.S), torch.from_numpy(found.Vh)


def orthonormal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors (n, k) and singular values (k,), descending, with k = min(n, p); by way of a QR."""
    n, p = matrix.shape
    if n <= p:
        u, sizes, _ = singular(_qr(matrix.T)[1].T)
        return u, sizes
    q, r = _qr(matrix)
    u, sizes, _ = singular(r)
    return q @ u, sizes


def _qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    if not for_numpy(matrix):
        q, r = torch.linalg.qr(matrix)
        return q, r
    with threads_for(matrix):
        found = np.linalg.qr(matrix.numpy())
    return torch.from_numpy(found.Q), torch.from_numpy(found.R)


def cholesky(matrix: Tensor) -> Tensor:
    """L with L Lᵀ the matrix, which must be positive definite; differentiable."""
    if not for_numpy(matrix):
        return torch.linalg.cholesky(matrix)
    with threads_for(matrix):
        return torch.from_numpy(np.linalg.cholesky(matrix.numpy()))


def gram_factor(matrix: Tensor) -> Tensor:
    """F (p, rank) with F Fᵀ a positive semidefinite float64 matrix on a CPU, to its last digits; not differentiable.

    Its Cholesky factor, in a tenth of the time of eigenvectors. Where it is singular the largest directions come first,
    until what is left is rounding: below p times that of the largest entry.
    """
    from scipy.linalg.lapack import dpotrf, dpstrf

    with threads_for(matrix):
        # LAPACK's own, in a third of the time of NumPy's; symmetric, so that the transpose saves a copy
        found, failed = dpotrf(matrix.numpy().T, lower=1)
        if not failed:
            return torch.from_numpy(found)
        found, order, rank, _ = dpstrf(matrix.numpy().T, lower=1)
    factor = np.empty((rank, len(found)))
    factor[:, order - 1] = np.triu(found.T)[:rank]
    return torch.from_numpy(factor).T


def triangular_inverse(factor: Tensor) -> Tensor:
    """L⁻¹ of a lower triangle with no zero on its diagonal; differentiable."""
    if not for_numpy(factor) or factor.dtype != torch.float64:
        return torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
    from scipy.linalg.lapack import dtrtri  # knows that half of the result is zero, as a solver does not

    with threads_for(factor):
        return torch.from_numpy(dtrtri(factor.numpy(), lower=1)[0])


def threads_for(matrix: Tensor) -> AbstractContextManager[None]:
    """One core for what is small: several gain nothing, and libraries that take turns wait for each other's threads."""
    return one_thread() if min(matrix.shape[-2:]) <= SMALL else nullcontext()
