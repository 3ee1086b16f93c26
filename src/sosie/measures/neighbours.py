"""Measures that compare the nearest neighbours of rows, by cosine."""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor

from ..checks import whole_number
from ..linalg import self_product
from ..stats import PairedRows, SiteRows
from .define import define

ROUNDING = 1e-12  # of the largest score; closer scores are ties

# Facts that these measures share, unless a measure declares otherwise.
by_neighbours = functools.partial(
    define, reads=PairedRows, bounds=(0, 1), closer="up", invariant={"rotation", "scale"}, differentiable=False
)


@by_neighbours(paper="huh2024", cost="n² (p + q)", chance="k / (n − 1)")
def mutual_knn(rows: PairedRows, k: int = 10) -> Tensor:
    """Share of each row's k nearest rows (by cosine) that both sides have in common, averaged over rows.

    Independent sides have about k / (n − 1). Rows that are equally near, such as duplicates, or all of one sign with a
    single neuron, are ordered at random, by a draw that the rows decide: scaled or rotated rows draw another order. So
    it is in all measures of neighbours.
    """
    return _matches(*_both_lists(rows, k, "mutual_knn")).sum((1, 2)).double().mean() / k


@by_neighbours(paper="wang2020, klabunde2025", cost="n² (p + q)", chance="about k / (2 (n − 1) − k)")
def jaccard(rows: PairedRows, k: int = 10) -> Tensor:
    """Common neighbours of each row over its neighbours on either side (k nearest by cosine), averaged over rows.

    Never above mutual_knn: the same number c of common neighbours, over 2k − c instead of k.
    """
    common = _matches(*_both_lists(rows, k, "jaccard")).sum((1, 2)).double()
    return (common / (2 * k - common)).mean()


@by_neighbours(
    bounds=(-1, 1),
    paper="hamilton2016",
    cost="n² (p + q)",
    chance="above 0 where rows share a direction, 0 where the cosines of each side have mean 0",
)
def second_order_cosine(rows: PairedRows, k: int = 10) -> Tensor:
    """Cosine between each row's cosines to its neighbours on one side and on the other, averaged over rows.

    The neighbours are the k nearest on either side, together. As in the paper, entries are cosine similarities; some
    code takes cosine distances, which gives other values.
    """
    near_x, near_y = _both_lists(rows, k, "second_order_cosine")
    union = torch.cat([near_x, near_y], 1)
    # A row on both lists counts once.
    once = torch.cat([torch.ones_like(near_x, dtype=torch.bool), ~_matches(near_x, near_y).any(1)], 1)
    x, y = (side.memo("cosines", cosines, "square").gather(1, union) * once for side in (rows.x, rows.y))
    lengths = x.norm(dim=1) * y.norm(dim=1)
    if not bool((lengths > 0).all()):
        raise ValueError(
            f"second_order_cosine is undefined: {int((lengths == 0).sum())} of {len(x)} rows are orthogonal to all "
            "their neighbours; take a larger k"
        )
    return ((x * y).sum(1) / lengths).mean()


@by_neighbours(
    paper="wang2020, klabunde2025",
    cost="n² (p + q) + n k²",
    chance="about Σ 2 / ((1 + |r − s|) (r + s)) / (n − 1) over all ranks r, s ≤ k; less than that when k² > n",
)
def rank_similarity(rows: PairedRows, k: int = 10) -> Tensor:
    """Agreement of both sides on the ranks of common neighbours (k nearest by cosine), averaged over rows.

    Σ 2 / ((1 + |r − s|) (r + s)) over common neighbours of rank r and s, over the maximum for c common neighbours,
    1 + 1/2 + … + 1/c; 0 for a row without common neighbours. Their number hardly counts: read it beside jaccard.
    """
    matches = _matches(*_both_lists(rows, k, "rank_similarity"))
    rank = torch.arange(1, k + 1, device=matches.device, dtype=torch.float64)
    weight = 2 / ((1 + (rank[:, None] - rank).abs()) * (rank[:, None] + rank))
    most = torch.cat([rank.new_ones(1), (1 / rank).cumsum(0)])  # 0 / 1 without common neighbours
    return ((matches * weight).sum((1, 2)) / most[matches.sum((1, 2))]).mean()


@by_neighbours(
    same=None, symmetric=False, paper="huh2024", cost="n² (p + q) + n k²", chance="about 1 − (1 − k / (n − 1))ᵏ"
)
def cycle_knn(rows: PairedRows, k: int = 10) -> Tensor:
    """Share of rows that can return to themselves by one of their k nearest in y and one of its k nearest in x.

    Not always 1 for rows with themselves: an outlier is a neighbour of no row.
    """
    near_x, near_y = _both_lists(rows, k, "cycle_knn")
    itself = torch.arange(len(near_x), device=near_x.device)[:, None, None]
    return (near_x[near_y] == itself).any(2).any(1).double().mean()


@by_neighbours(paper="huh2024", cost="n² (p + q) + n k²", chance="k / (n − 1) or a little less")
def lcs_knn(rows: PairedRows, k: int = 10) -> Tensor:
    """Longest common subsequence of the two ordered lists of k nearest rows (by cosine), over k, averaged over rows.

    Never above mutual_knn. The authors' code returns the length, from 0 to k.
    """
    matches = _matches(*_both_lists(rows, k, "lcs_knn")).long()
    # longest[:, b] is for the first entries of x's list, up to the current one, and the first b of y's.
    longest = matches.new_zeros(len(matches), k + 1)
    for a in range(k):
        longer = torch.maximum(longest[:, 1:], longest[:, :-1] + matches[:, a])
        longest = torch.cat([longest[:, :1], longer.cummax(1).values], 1)
    return longest[:, -1].double().mean() / k


@by_neighbours(bounds=(-1, 1), paper="huh2024", cost="n² (p + q)", chance="k / (n − 1), or less")
def cknna(rows: PairedRows, k: int = 10) -> Tensor:
    """Alignment of two kernels over pairs that are k nearest neighbours on both sides.

    Σ K̄ᵢⱼ L̄ᵢⱼ over pairs where j is among the k nearest of i on both sides (by inner product), over the root of the
    product of this sum for each side with itself; K̄ is the Gram matrix of unit rows less the mean of each row. That is
    the paper's formula; its authors' code masks first and then takes an unbiased HSIC.
    """
    near_x, near_y = _both_lists(rows, k, "cknna")
    a, b = (side.memo("cosines", cosines, "square") for side in (rows.x, rows.y))
    (x, mean_x), (y, mean_y) = ((kernel, kernel.mean(1, keepdim=True)) for kernel in (a, b))
    common = _matches(near_x, near_y).any(2)
    both = ((x.gather(1, near_x) - mean_x) * (y.gather(1, near_x) - mean_y) * common).sum()
    of_x = (x.gather(1, near_x) - mean_x).square().sum()
    of_y = (y.gather(1, near_y) - mean_y).square().sum()
    return both / (of_x * of_y).sqrt()


def _both_lists(rows: PairedRows, k: int, name: str) -> tuple[Tensor, Tensor]:
    """(n, k) each: the nearest other rows by cosine, nearest first, found once per site for all measures."""

    def near(side: SiteRows) -> Tensor:
        return side.memo(("neighbours", k), lambda r: nearest(cosines(r), k, r), "neighbours")

    check_k(name, k, len(rows.x.rows))
    return near(rows.x), near(rows.y)


def check_k(name: str, k: int, n: int) -> None:
    if whole_number(k, f"{name} counts neighbours: k", least=1) >= n:
        raise ValueError(f"{name}(k={k}) needs more than k rows, got {n}")


def row_lengths(rows: Tensor) -> Tensor:
    """(n,): the lengths of the rows, which must not be 0."""
    lengths = rows.norm(dim=1)
    if not bool((lengths > 0).all()):
        raise ValueError(f"cosines need directions, but {int((lengths == 0).sum())} of {len(rows)} rows are all zero")
    return lengths


def cosines(rows: Tensor) -> Tensor:
    """(n, n): cosine of every row with every other."""
    return self_product((rows / row_lengths(rows)[:, None]).T)


def nearest(score: Tensor, k: int, rows: Tensor) -> Tensor:
    """(n, k): the columns with the largest scores, largest first, without the diagonal.

    Scores that differ by rounding alone are ties, which are ordered at random: in the order of the rows, which both
    sides share, they would count as common neighbours. The rows seed the draw, so that a side agrees with itself.
    """
    score = score.detach()
    low, high = score.aminmax()
    step = ROUNDING * torch.maximum(-low, high)

    def rounded(some: Tensor) -> Tensor:
        return (some / step).round_() if bool(step > 0) else some

    # In place and back, since a copy takes as long as all the rest; rounding keeps the order of all but ties.
    diagonal = score.diagonal().clone()
    score.fill_diagonal_(-torch.inf)
    top = score.topk(min(k + 1, score.shape[1]), dim=1)
    columns, values = top.indices[:, :k], rounded(top.values)
    tied = (values[:, 1:] == values[:, :-1]).any(1)
    if bool(tied.any()):
        seed = zlib.crc32(rows.detach().cpu().contiguous().numpy().tobytes())
        order = torch.randperm(score.shape[1], generator=torch.Generator().manual_seed(seed)).to(score.device)
        columns[tied] = order[rounded(score[tied])[:, order].argsort(dim=1, descending=True, stable=True)[:, :k]]
    score.diagonal().copy_(diagonal)
    return columns


def _matches(near_x: Tensor, near_y: Tensor) -> Tensor:
    """(n, k, k): whether entry a of x's list is entry b of y's."""
    return near_x[:, :, None] == near_y[:, None, :]
