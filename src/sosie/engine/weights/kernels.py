"""W Wᵀ of every site of a model, W (d, p) its linear map from the d entries of the input; of norm 1 each.

A chain of layers starts with one matrix, so that all its maps live in the span of that matrix's columns: the kernels
are kept in a basis of it, and two models of the same or of other sizes meet in the product of their bases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...linalg import VANISHED, Invariants, centred, chain_products, double_centred, unit

BLOCK_BYTES = 2**23  # that a block of pairs of models takes


@dataclass(frozen=True)
class Kernels:
    """Of N models with equally many sites: basis · core · basisᵀ, NaN where a map vanishes."""

    basis: Tensor | None  # (N, d, r) with orthonormal columns; None: the entries of the input themselves, r = d
    cores: Tensor  # (N, S, r, r)

    def member(self, k: int) -> Kernels:
        """One model alone."""
        return Kernels(None if self.basis is None else self.basis[k : k + 1], self.cores[k : k + 1])

    def invariants(self, k: int) -> Invariants:
        """What the chance level of a member's sites (S,) depends on."""
        trace = self.cores[k].diagonal(dim1=-2, dim2=-1).sum(-1)
        if self.basis is None:
            along = self.cores[k].diagonal(dim1=-2, dim2=-1)
        else:
            along = (self.basis[k] @ self.cores[k] * self.basis[k]).sum(-1)  # (S, d)
        return Invariants(trace, torch.ones_like(trace), along.square().sum(-1))

    def dense(self) -> Kernels:
        """In the entries of the input."""
        if self.basis is None:
            return self
        q = self.basis[:, None]
        return Kernels(None, q @ self.cores @ q.mT)


def of_chains(weights: Sequence[Tensor], depths: Sequence[int], *, centre: bool) -> Kernels:
    """Of N chains with factors (N, d, p₁), (N, p₁, p₂), …, at these depths: how many factors are multiplied."""
    first = unit(weights[0])
    whole = first.square().sum((-2, -1))
    q, r = torch.linalg.qr(centred(first) if centre else first)
    maps = chain_products([r, *weights[1:]])
    kernels = torch.stack([maps[depth - 1] @ maps[depth - 1].mT for depth in depths], dim=1)
    lost = ~(r.square().sum((-2, -1)) > VANISHED * whole)
    kernels[lost] = torch.nan
    return Kernels(q, _normed(kernels))


def of_maps(maps: Sequence[Tensor], *, centre: bool) -> Kernels:
    """Of one model, from its maps (d, p) one by one."""
    kernels = []
    for each in maps:
        kernel = each @ each.mT
        whole = kernel.diagonal().sum()
        kernel = double_centred(kernel) if centre else kernel
        kernels.append(
            kernel if bool(kernel.diagonal().sum() > VANISHED * whole) else torch.full_like(kernel, torch.nan)
        )
    return Kernels(None, _normed(torch.stack(kernels)[None]))


def _normed(kernels: Tensor) -> Tensor:
    """Of norm 1; a kernel of zeros becomes NaN."""
    return kernels / torch.linalg.vector_norm(kernels, dim=(-2, -1), keepdim=True)


def inner_products(a: Kernels, b: Kernels, *, upper: bool = False) -> Tensor:
    """⟨K, L⟩ for all members and sites: (N, M, S, T). `upper`: a is b, and only members i < j are filled."""
    if (a.basis is None) != (b.basis is None):
        a, b = a.dense(), b.dense()
    (n, s, r, _), (m, t, q, _) = a.cores.shape, b.cores.shape
    found = a.cores.new_full((n, m, s, t), torch.nan)
    if a.basis is None or b.basis is None:
        flat_a, flat_b = a.cores.reshape(n * s, -1), b.cores.reshape(m * t, -1)
        return (flat_a @ flat_b.T).reshape(n, s, m, t).permute(0, 2, 1, 3)
    each = 8 * r * q * (s + t + 1)
    step_j = max(1, min(m, BLOCK_BYTES // each))
    step_i = max(1, min(n, BLOCK_BYTES // (each * step_j)))
    for i in range(0, n, step_i):
        for j in range(i if upper else 0, m, step_j):
            rows, columns = slice(i, i + step_i), slice(j, j + step_j)
            found[rows, columns] = _met(a.basis[rows], a.cores[rows], b.basis[columns], b.cores[columns])
    return found


def _met(basis_a: Tensor, cores_a: Tensor, basis_b: Tensor, cores_b: Tensor) -> Tensor:
    """⟨P, C L Cᵀ⟩ = ⟨P C, C L⟩ with C the product of two bases, for a block of models."""
    (n, s, r, _), (m, t, q, _) = cores_a.shape, cores_b.shape
    d = basis_a.shape[1]
    # By torch as what follows: threads of two libraries would fight over the cores.
    met = basis_a.mT.reshape(n * r, d) @ basis_b.permute(1, 0, 2).reshape(d, m * q)  # (n r, m q)
    left = cores_a.reshape(n, s * r, r) @ met.reshape(n, r, m * q)  # (n, s r, m q)
    left = left.reshape(n, s, r, m, q).permute(0, 3, 1, 2, 4).reshape(n * m, s, r * q)
    of_b = met.reshape(n * r, m, q).permute(1, 0, 2)  # (m, n r, q)
    right = of_b @ cores_b.permute(0, 2, 1, 3).reshape(m, q, t * q)  # (m, n r, t q)
    right = right.reshape(m, n, r, t, q).permute(1, 0, 2, 4, 3).reshape(n * m, r * q, t)
    return (left @ right).reshape(n, m, s, t)
