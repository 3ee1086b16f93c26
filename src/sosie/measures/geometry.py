"""Measures that compare the shape of two clouds of rows: a number or curve of each, or their topology."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..linalg import centred, eigenvalues, row_squares, self_product
from ..stats import PairedRows
from .define import define
from .neighbours import check_k, cosines, nearest, row_lengths

# Tsitsulin et al.'s temperatures, and the weight that makes the distance a bound on spectral Gromov–Wasserstein
TEMPERATURES = torch.logspace(-1, 1, 256, dtype=torch.float64)
WEIGHTS = torch.exp(-2 * (TEMPERATURES + 1 / TEMPERATURES))

# Facts that these measures share, unless a measure declares otherwise.
unpaired_distance = functools.partial(
    define, reads=PairedRows, closer="down", paired=False, chance="does not depend on the pairing"
)


@unpaired_distance(bounds=(0, None), invariant={"rotation"}, paper="wang2020, klabunde2025", cost="n (p + q)")
def magnitude_difference(rows: PairedRows) -> Tensor:
    """Difference between the lengths of the two mean rows."""
    x, y = (side.memo("magnitude", lambda r: r.mean(0).norm()) for side in (rows.x, rows.y))
    return (x - y).abs()


@unpaired_distance(bounds=(0, 2), invariant={"rotation", "scale"}, paper="wang2020, klabunde2025", cost="n (p + q)")
def concentricity_difference(rows: PairedRows) -> Tensor:
    """Difference between the concentricities of the two sides, the mean cosine of the rows with their mean row."""
    x, y = (side.memo("concentricity", _concentricity) for side in (rows.x, rows.y))
    return (x - y).abs()


def _concentricity(rows: Tensor) -> Tensor:
    mean, lengths = rows.mean(0), row_lengths(rows)
    length = mean.norm()
    if not bool(length > 1e-10 * lengths.square().mean().sqrt()):
        raise ValueError("concentricity_difference needs a mean row that is not zero; are these rows centred?")
    return (rows @ mean / lengths).mean() / length


@unpaired_distance(
    bounds=(0, 8), invariant={"rotation", "scale"}, paper="wang_isola2020, klabunde2025", cost="n² (p + q)"
)
def uniformity_difference(rows: PairedRows) -> Tensor:
    """Difference between the uniformities of the two sides, log mean exp(−2 ‖u − v‖²) over pairs of unit rows.

    Over pairs of different rows, as Wang and Isola compute it; pairs of a row with itself bring both sides closer to 0.
    """
    x, y = (side.memo("uniformity", _uniformity) for side in (rows.x, rows.y))
    return (x - y).abs()


def _uniformity(rows: Tensor) -> Tensor:
    n = len(rows)
    if n < 2:
        raise ValueError(f"uniformity_difference needs at least 2 rows, got {n}")
    upper = torch.triu_indices(n, n, 1, device=rows.device)
    # ‖u − v‖² = 2 − 2 cos
    return torch.logsumexp(4 * cosines(rows)[upper[0], upper[1]] - 4, 0) - math.log(upper.shape[1])


@unpaired_distance(
    bounds=(0, math.exp(-4)),
    invariant={"rotation", "scale", "shift"},
    differentiable=False,
    paper="tsitsulin2020",
    cost="n² (p + q) + n³",
)
def imd(rows: PairedRows, k: int = 5) -> Tensor:
    """Intrinsic multi-scale distance: largest weighted difference between the heat traces of the neighbour graphs.

    max over t of exp(−2 (t + 1/t)) |h(t) − h'(t)|, at 256 temperatures t from 0.1 to 10 at equal ratios, where
    h(t) = Σ exp(−t λ) / n over the eigenvalues λ of the normalised Laplacian of the undirected graph that joins each
    row with its k nearest (Euclidean), with weights of 1. Eigenvalues are exact; the authors' code estimates the traces
    by stochastic Lanczos and multiplies the distance by 10⁶.
    """
    check_k("imd", k, len(rows.x.rows))
    x, y = (side.memo(("heat trace", k), lambda r: _heat_trace(r, k)) for side in (rows.x, rows.y))
    return ((x - y).abs() * WEIGHTS.to(x.device)).max()


def _heat_trace(rows: Tensor, k: int) -> Tensor:
    """(256,): mean of exp(−t λ) over eigenvalues, for each temperature."""
    n = len(rows)
    joined = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    joined.scatter_(1, nearest_euclidean(rows, k), 1.0)
    joined = torch.maximum(joined, joined.T)
    root = joined.sum(1).rsqrt()  # each row has k neighbours or more
    # The Laplacian's eigenvalues are 1 less those of the normalised graph.
    values = 1 - eigenvalues(root[:, None] * joined * root)
    return torch.exp(-TEMPERATURES.to(rows.device)[:, None] * values).mean(1)


def nearest_euclidean(rows: Tensor, k: int) -> Tensor:
    """(n, k): the nearest other rows, nearest first."""
    x = centred(rows.detach())  # changes the rounding of distances, not distances
    # −‖xᵢ − xⱼ‖² + ‖xᵢ‖²: the same order within a row
    return nearest(self_product(x.T).mul_(2).sub_(row_squares(x)), k, x)


@unpaired_distance(
    bounds=(0, None),
    invariant={"rotation", "scale", "shift"},
    differentiable=False,
    paper="facco2017",
    cost="n² (p + q)",
)
def intrinsic_dimension_difference(rows: PairedRows, discard: float = 0.1) -> Tensor:
    """Difference between the intrinsic dimensions of the two sides, from the two nearest rows of each row (TwoNN).

    The slope through the origin of −log(1 − F(μ)) against log μ, with μ the distance to the second nearest row over
    that to the nearest and F its empirical distribution, without the share `discard` of largest ratios, as in the
    paper. Others take the maximum likelihood, (n − 1) / Σ log μ. Edges lower it: about 4.7 for 2000 rows in a cube of 5
    dimensions, 8.7 for 10.
    """
    if not 0 <= discard < 1:
        raise ValueError(f"intrinsic_dimension_difference leaves out a share from 0 to below 1, got discard={discard}")
    key = ("intrinsic dimension", discard)
    x, y = (side.memo(key, lambda r: _intrinsic_dimension(r, discard)) for side in (rows.x, rows.y))
    return (x - y).abs()


def _intrinsic_dimension(rows: Tensor, discard: float) -> Tensor:
    n = len(rows)
    kept = min(n - int(n * discard), n - 1)  # F = 1 for the largest ratio, which has no logarithm
    if n < 3 or kept < 1:
        raise ValueError(f"intrinsic_dimension_difference needs more rows, got {n}, of which it would use {kept}")
    near = nearest_euclidean(rows, 2)
    # From differences, not inner products, so that equal rows have a distance of exactly 0.
    distances = torch.stack([(rows - rows[near[:, j]]).norm(dim=1) for j in range(2)], 1).sort(1).values
    twins = int((distances[:, 0] == 0).sum())
    if twins:
        raise ValueError(
            f"the intrinsic dimension is undefined for equal rows: {twins} of {n} rows are equal to another; remove "
            "duplicates"
        )
    ratio = (distances[:, 1] / distances[:, 0]).log().sort().values[:kept]
    if not bool(ratio[-1] > 0):
        raise ValueError("the intrinsic dimension is undefined: each row's two nearest are equally far, as on a grid")
    height = -torch.log1p(-torch.arange(1, kept + 1, dtype=ratio.dtype, device=ratio.device) / n)
    return (ratio * height).sum() / ratio.square().sum()


@define(
    reads=PairedRows,
    bounds=(0, None),
    closer="down",
    invariant={"rotation", "scale", "shift"},
    differentiable=False,
    paper="barannikov2022",
    cost="r² (p + q) + two barcodes of 2r points, r = min(n, rows)",
    chance="grows with the number of rows compared",
)
def rtd(paired: PairedRows, rows: int = 400, seed: int = 0) -> Tensor:
    """Representation topology divergence: difference in how two clouds of rows are connected, over all scales.

    The sum of the bars of R-Cross-Barcode₁, averaged over both directions; distances are Euclidean, divided by the 0.9
    quantile of all n² on each side. Beyond `rows` rows, one subset drawn with `seed` is compared (the authors average
    ten draws of 500); the value grows with their number, so compare it at equal numbers only. Takes seconds per pair of
    sites. Needs `pip install 'sosie[topology]'`.
    """
    n = len(paired.x.rows)
    if n < 2 or rows < 2:
        raise ValueError(f"rtd needs at least 2 rows, got {n}, of which at most {rows} are to be used")
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:rows].sort().values
    key = ("scaled distances", rows, seed)
    x, y = (side.memo(key, lambda r: _scaled_distances(r[drawn.to(r.device)])) for side in (paired.x, paired.y))
    total = (_cross_barcode(x, y) + _cross_barcode(y, x)) / 2
    return torch.tensor(total, dtype=torch.float64, device=paired.x.rows.device)


def _scaled_distances(rows: Tensor) -> np.ndarray:
    rows = rows.detach()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").double().cpu().numpy()
    unit = np.quantile(distances, 0.9)
    if unit == 0:
        raise ValueError(f"rtd is undefined: nine in ten of the distances between {len(rows)} rows are 0")
    return distances / unit


def _cross_barcode(x: np.ndarray, y: np.ndarray) -> float:
    """Total length of the bars of dimension 1 of the graph on two copies of the rows.

    The first copy is one point; distances from a row of the second copy to rows of the first are those of x, and within
    the second copy the smaller of those of x and y.
    """
    n = len(x)
    graph = np.zeros((2 * n, 2 * n))
    graph[n:, :n] = graph[:n, n:] = x
    graph[n:, n:] = np.minimum(x, y)
    # ripser computes in float32. Only the order of lengths matters, so it gets their ranks, which are exact.
    lengths, rank = np.unique(graph, return_inverse=True)
    if len(lengths) > 2**24:
        raise ValueError(f"rtd distinguishes 2²⁴ distances, {n} rows have {len(lengths)}; use fewer: rtd(rows=400)")
    bars = _ripser()(rank.reshape(graph.shape).astype(np.float32), maxdim=1, distance_matrix=True)["dgms"][1]
    born, died = lengths[bars.astype(np.int64)].T
    return float((died - born).sum())


def _ripser() -> Any:
    try:
        from ripser import ripser
    except ImportError as error:
        raise ImportError("rtd needs ripser: pip install 'sosie[topology]'") from error
    return ripser
