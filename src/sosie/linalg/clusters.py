"""Clusters of similar items, from a matrix of similarities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def cluster(similarity: Tensor, count: int) -> Tensor:
    """Cluster N items into `count` groups by average linkage on 1 − similarity (N, N); return the group of each, (N,).

    Groups are numbered by their first member.
    """
    return clusterings(similarity, [count])[0]


def clusterings(similarity: Tensor, counts: Sequence[int], *, ward: bool = False) -> list[Tensor]:
    """`cluster` for several numbers of groups, from one linkage.

    `ward` merges the groups whose squared distances 2 − 2 similarity to their centre grow least (Ward 1963). Average
    linkage cuts off outliers one by one; Ward's makes groups of similar size.
    """
    from scipy.cluster.hierarchy import linkage

    n = _checked(similarity)
    for count in counts:
        if not 1 <= count <= n:
            raise ValueError(f"{n} items cannot be put into {count} groups")
    if n == 1:
        return [torch.zeros(1, dtype=torch.long) for _ in counts]
    first, second = torch.triu_indices(n, n, 1)
    both = similarity.detach().cpu().double()
    distances = (1 - (both + both.T) / 2)[first, second].numpy()
    if ward:
        distances = np.sqrt(2 * distances.clip(0))  # below 0 by rounding for equal items
    merges = linkage(distances, "ward" if ward else "average")[:, :2].astype(int).tolist()
    return [_without_last(merges, n, count) for count in counts]


def _without_last(merges: Sequence[Sequence[int]], n: int, count: int) -> Tensor:
    """The merges come nearest first: all but the last `count` − 1 leave `count` groups, ties or not."""
    groups = {k: [k] for k in range(n)}
    for k, (a, b) in enumerate(merges[: n - count]):
        groups[n + k] = groups.pop(a) + groups.pop(b)
    numbers = torch.empty(n, dtype=torch.long)
    for number, group in enumerate(sorted(groups.values(), key=min)):
        numbers[group] = number
    return numbers


def most_similar(similarity: Tensor, count: int) -> Tensor:
    """The `count` other items most similar to each of N, nearest first: (N, count); ties by number."""
    n = _checked(similarity)
    if not 1 <= count < n:
        raise ValueError(f"count={count}: each of {n} items has {n - 1} others")
    others = similarity.detach().clone().fill_diagonal_(-torch.inf)
    return others.argsort(dim=1, descending=True, stable=True)[:, :count]


def adjusted_rand_index(labels: Tensor, others: Tensor) -> float:
    """Agreement of two groupings of the same items on pairs: 1 for the same, 0 by chance on average.

    Hubert and Arabie 1985. Two groupings that are both one group, or both groups of one item, have 1.
    """
    if labels.shape != others.shape or labels.ndim != 1 or not len(labels):
        raise ValueError(f"need a label for each item in both, got {tuple(labels.shape)} and {tuple(others.shape)}")
    a, b = (side.cpu().unique(return_inverse=True)[1] for side in (labels, others))
    width = int(b.max()) + 1
    table = (a * width + b).bincount(minlength=(int(a.max()) + 1) * width).view(-1, width)
    same, rows, columns = (int((c * (c - 1) // 2).sum()) for c in (table, table.sum(1), table.sum(0)))
    pairs = len(labels) * (len(labels) - 1) // 2
    # (same − rows columns / pairs) / ((rows + columns)/2 − rows columns / pairs), in whole numbers up to the division.
    above, below = 2 * (same * pairs - rows * columns), (rows + columns) * pairs - 2 * rows * columns
    return above / below if below else 1.0


def _checked(similarity: Tensor) -> int:
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1] or not len(similarity):
        raise ValueError(f"need the similarities of all pairs, (N, N), got {tuple(similarity.shape)}")
    if not bool(torch.isfinite(similarity).all()):
        raise ValueError(f"{int((~torch.isfinite(similarity)).sum())} similarities are NaN or infinite")
    uneven = float((similarity - similarity.T).abs().max())
    if uneven > 1e-4 * float(similarity.abs().max()):
        raise ValueError(f"similarities are not symmetric: those of two items differ by {uneven:g}")
    return len(similarity)
