"""Products of many matrices, with a scale of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

VANISHED = 1e-24  # share of Σ W² that rounding alone leaves when a map that is the same for each input is centred


def unit(matrix: Tensor) -> Tensor:
    """The matrix (…, d, p) over its largest entry; a matrix of zeros stays as it is.

    The factor is a constant to a gradient: whoever divides by the size later has it right all the same.
    """
    largest = matrix.detach().abs().amax((-2, -1), keepdim=True)
    return matrix / largest.where(largest > 0, largest.new_ones(()))


def chain_products(factors: Sequence[Tensor]) -> list[Tensor]:
    """W₁, W₁W₂, W₁W₂W₃, … (…, d, p) each times a positive number, so that deep chains neither overflow nor vanish."""
    for k, (left, right) in enumerate(itertools.pairwise(factors)):
        if left.shape[-1] != right.shape[-2]:
            shapes = f"{tuple(left.shape[-2:])} and {tuple(right.shape[-2:])}"
            raise ValueError(f"factors {k + 1} and {k + 2} do not fit together: {shapes}; each is (inputs, outputs)")
    found = [unit(factors[0])]
    for factor in factors[1:]:
        found.append(unit(found[-1] @ unit(factor)))
    return found


def vanishes(size: float, whole: float) -> bool:
    """Whether a kernel of this norm, of a map with this Σ W², is rounding."""
    return not size > VANISHED * whole
