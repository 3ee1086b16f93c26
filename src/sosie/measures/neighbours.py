"""Measures that compare which rows lie near which."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stats import PairedRows
from .define import define


@define(
    reads=PairedRows,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale"},
    symmetric=True,
    differentiable=False,
    paper="huh2024",
    cost="n² (p + q)",
    chance="k / (n − 1)",
)
def mutual_knn(rows: PairedRows, k: int = 10) -> Tensor:
    """Share of each row's k nearest rows (by cosine) that both sides agree on, averaged over rows.

    Independent sides give about k / (n − 1).
    """
    n = len(rows.x.rows)
    if not 1 <= k < n:
        raise ValueError(f"mutual_knn(k={k}) needs more than k rows, got {n}")
    x, y = (side.memo(("neighbours", k), lambda r: _nearest(r, k), "neighbours") for side in (rows.x, rows.y))
    both = torch.zeros(n, n, dtype=torch.bool, device=x.device).scatter_(1, x, True)
    return both.gather(1, y).sum(1).double().mean() / k


def _nearest(rows: Tensor, k: int) -> Tensor:
    """(n, k): the nearest other rows by cosine; equal ones in the order of the rows."""
    lengths = rows.norm(dim=1, keepdim=True)
    if not bool((lengths > 0).all()):
        raise ValueError(f"mutual_knn compares directions, but {int((lengths == 0).sum())} rows are all zero")
    units = rows / lengths
    cosines = (units @ units.T).fill_diagonal_(-torch.inf)
    return cosines.argsort(dim=1, descending=True, stable=True)[:, :k]
