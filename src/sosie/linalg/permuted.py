"""Mean and variance of ⟨K, P L Pᵀ⟩ over all permutations P, for centred symmetric K and L, in closed form.

Kazi-Aoual, Hitier, Sabatier and Lebreton (1995) give them for the RV coefficient, which linear CKA is.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Invariants:
    """What the moments depend on; shapes broadcast over pairs of sites."""

    trace: Tensor  # Σ Kᵢᵢ
    norm: Tensor  # Σ Kᵢⱼ²
    diagonal: Tensor  # Σ Kᵢᵢ²


def permuted_moments(k: Invariants, l: Invariants, n: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of ⟨K, P L Pᵀ⟩; needs at least 4 rows."""
    n = float(n)  # products of five of them do not fit into an integer
    mean = k.trace * l.trace / (n - 1)
    spread = 2 * _spectral(k, n) * _spectral(l, n) / ((n - 1) ** 2 * (n + 1) * (n - 2))
    return mean, spread + _diagonal(k, n) * _diagonal(l, n) / ((n + 1) * n * (n - 1) * (n - 2) * (n - 3))


def _spectral(m: Invariants, n: float) -> Tensor:
    return (n - 1) * m.norm - m.trace.square()


def _diagonal(m: Invariants, n: float) -> Tensor:
    return n * (n + 1) * m.diagonal - (n - 1) * (m.trace.square() + 2 * m.norm)
