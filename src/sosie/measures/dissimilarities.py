"""Representational similarity analysis: correlate two sides' dissimilarities between rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stats import PairedRows
from .define import define


@define(
    reads=PairedRows,
    bounds=(-1, 1),
    same=1,
    closer="up",
    invariant={"permutation", "scale"},
    symmetric=True,
    differentiable=False,
    paper="kriegeskorte2008",
    cost="n² (p + q + log n)",
    chance="0",
)
def rsa(rows: PairedRows, dissimilarity: str = "correlation", compare: str = "spearman") -> Tensor:
    """Correlation between the two sides' dissimilarities of all pairs of rows.

    Dissimilarity: 1 − Pearson correlation of two rows ("correlation") or "euclidean" distance; compared by
    "spearman" (average ranks for ties) or "pearson". Toolboxes differ in what they take by default:
    Kriegeskorte et al. take the first of each, as here; rsatoolbox compares by cosine.
    """
    if dissimilarity not in DISSIMILARITIES or compare not in COMPARATORS:
        raise ValueError(
            f"rsa knows the dissimilarities {', '.join(DISSIMILARITIES)} and the comparators "
            f"{', '.join(COMPARATORS)}; got {dissimilarity!r} and {compare!r}"
        )
    if len(rows.x.rows) < 3:
        raise ValueError(f"rsa needs at least 3 rows, got {len(rows.x.rows)}")

    def vector(x: Tensor) -> Tensor:
        upper = torch.triu_indices(len(x), len(x), 1, device=x.device)
        found = COMPARATORS[compare](DISSIMILARITIES[dissimilarity](x)[upper[0], upper[1]])
        found = found - found.mean()
        length = found.norm()
        if not bool(length > 0):
            raise ValueError("rsa is undefined: all rows are equally far apart")
        return found / length

    x, y = (side.memo(("rsa", dissimilarity, compare), vector) for side in (rows.x, rows.y))
    return x @ y


def _correlation(x: Tensor) -> Tensor:
    if x.shape[1] < 2:
        raise ValueError("rows of one column have no correlation; use rsa(dissimilarity='euclidean')")
    x = x - x.mean(1, keepdim=True)
    lengths = x.norm(dim=1, keepdim=True)
    if not bool((lengths > 0).all()):
        raise ValueError(
            f"rsa by correlation needs rows that vary, but {int((lengths == 0).sum())} rows are constant; "
            "use rsa(dissimilarity='euclidean')"
        )
    units = x / lengths
    return 1 - units @ units.T


def _euclidean(x: Tensor) -> Tensor:
    return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")


def _ranks(values: Tensor) -> Tensor:
    """Average ranks."""
    _, inverse, counts = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).to(values.dtype)
    return (last - (counts.to(values.dtype) - 1) / 2)[inverse]


DISSIMILARITIES = {"correlation": _correlation, "euclidean": _euclidean}
COMPARATORS = {"spearman": _ranks, "pearson": lambda values: values}
