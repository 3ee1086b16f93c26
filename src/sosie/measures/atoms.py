"""Measures of filter atoms, for models that share their coefficients; no data."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stats import Atoms
from .define import define

BLOCK = 2**22  # numbers that a block of pairs may take


@define(
    reads=Atoms,
    bounds=(-1, 1),
    same=1,
    closer="up",
    invariant={"scale"},
    symmetric=True,
    paper="atoms2023",
    cost="m d for m atoms of d entries",
    chance="0, ±1/√(m d), for independent atoms; near 1 for models that started from the same",
    same_width=True,
)
def atom_cosine(atoms: Atoms) -> Tensor:
    """Cosine of the two sets of atoms, entry by entry: equation 3 of the paper.

    Says something only of models with the same coefficients. Where these have orthonormal columns it is the cosine of
    the whole weights; other coefficients (αR⁻¹ with atoms RD, the same network) give another value.
    """
    x, y = _flat(atoms.x, "x"), _flat(atoms.y, "y")
    return x @ y.mT


@define(
    reads=Atoms,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"linear"},
    symmetric=True,
    paper="atoms2023, miao2021",
    cost="m² d for m atoms of d entries",
    chance="√(m/d) or up to a fifth less for independent atoms, 1 from m = d on",
    paired=False,
    same_width=True,
)
def atom_grassmann(atoms: Atoms) -> Tensor:
    """Mean cosine of the principal angles between the spans of two sets of atoms: equation 2 of the paper.

    Atoms that are as many as they have entries span everything, and any two models would give 1: that is an error.
    """
    _, m, d = atoms.x.shape
    if m >= d:
        raise ValueError(
            f"{m} atoms of {d} entries span all kernels there are: the value would be 1 whatever the models; "
            f"take fewer than {d} atoms"
        )
    x, y = _basis(atoms.x, "x"), _basis(atoms.y, "y")
    rows = max(1, BLOCK // (len(y) * m * m))
    found = [torch.linalg.svdvals(part[:, None] @ y.mT).mean(-1) for part in x.split(rows)]
    return torch.cat(found)


def _flat(atoms: Tensor, side: str) -> Tensor:
    flat = atoms.flatten(1)
    # By the largest first: the squares of very small or large numbers are 0 or infinite.
    largest = flat.detach().abs().amax(1, keepdim=True)
    _refuse((largest == 0).flatten(), side, "all atoms are 0: they have no direction")
    flat = flat / largest
    return flat / flat.norm(dim=1, keepdim=True)


def _basis(atoms: Tensor, side: str) -> Tensor:
    """Orthonormal rows (N, m, d) with the span of the atoms."""
    q, r = torch.linalg.qr(atoms.mT)
    diagonal = r.detach().diagonal(dim1=-2, dim2=-1).abs()
    digits = torch.finfo(atoms.dtype).eps * atoms.shape[-1]
    lost = ~(diagonal.amin(-1) > digits * diagonal.amax(-1))
    _refuse(lost, side, f"the {atoms.shape[1]} atoms are linearly dependent: they span fewer directions")
    return q.mT


def _refuse(bad: Tensor, side: str, why: str) -> None:
    if bool(bad.any()):
        which = f"model {int(bad.nonzero()[0])} of {side}" if len(bad) > 1 else side
        raise ValueError(f"{which}: {why}")
