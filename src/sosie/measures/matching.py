"""Measures that match neurons with neurons, and rows with rows after the best rotation."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..linalg import best_assignment, singular
from ..stats import Neurons, PairedRows
from .define import define
from .shape import distance_from
from .transforms import CLOSEST, MATCH, MATCH_BY_CORRELATION, UNCENTRED_ROTATION, transport

STEPS = 10**8  # of the network simplex, far beyond what the largest allowed problem takes

# Facts that measures of matched neurons share, unless a measure declares otherwise.
by_neurons = functools.partial(define, reads=Neurons, cost="n p q + p q min(p, q)", few_rows="biased")
by_distance = functools.partial(
    by_neurons, bounds=(0, 2), closer="down", invariant={"permutation", "scale", "shift"}, precise=True
)
by_correlation = functools.partial(
    by_neurons, bounds=(-1, 1), closer="up", invariant={"permutation", "stretch", "shift"}, paper="li2015"
)


@by_distance(
    paper="williams2021",
    chance="below √2 by the best of many matches, at least about √(2 − 2 √(2 log p / n))",
    aligned_by=MATCH,
)
def permutation_procrustes_distance(neurons: Neurons) -> Tensor:
    """Distance after centring, scaling each side to unit norm, and the best one-to-one match of neurons.

    The narrower side is padded with neurons that are always 0, so that surplus neurons count in full. Above √2 if even
    the best match is negative. At most 4096² pairs of neurons. The gradient is that of a fixed match.
    """
    return distance_from(neurons.matched.sum() / (neurons.x.sum().sqrt() * neurons.y.sum().sqrt()))


def _plan(neurons: Neurons) -> Tensor:
    """The transport plan (p, q) of least cost."""
    p, q = neurons.xy.shape
    if p == q:
        plan = torch.zeros_like(neurons.xy)
        plan[best_assignment(neurons.xy)] = 1 / p
        return plan
    x, y = (side.detach() / side.detach().mean() for side in (neurons.x, neurons.y))
    size = (neurons.x.mean() * neurons.y.mean()).sqrt().detach()
    cost = x[:, None] + y[None, :] - 2 * neurons.xy.detach() / size
    return torch.from_numpy(_transport(cost.cpu().numpy())).to(cost)


@by_distance(
    paper="khosla2024",
    cost="n p q + p q (p + q)",
    chance="below √2 by the best of many matches",
    aligned_by=transport(_plan),
)
def soft_match_distance(neurons: Neurons) -> Tensor:
    """Distance under the best transport of neurons to neurons, where all neurons of a side have equal weight.

    √(min Σ Tᵢⱼ ‖xᵢ − yⱼ‖²) over T ≥ 0 with row sums 1/p and column sums 1/q; neurons are centred and each side scaled
    so that ‖xᵢ‖² is 1 on average. Equal to permutation_procrustes_distance for equal widths. Unequal widths need POT
    (`pip install 'sosie[transport]'`). At most 4096² pairs of neurons.
    """
    return distance_from(neurons.transported(_plan) / (neurons.x.mean().sqrt() * neurons.y.mean().sqrt()))


def _transport(cost: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The cheapest plan (p, q) between uniform weights; exact."""
    p, q = cost.shape
    try:
        import ot
    except ImportError as error:
        raise ImportError(
            f"soft_match_distance of {p} and {q} neurons needs POT: pip install 'sosie[transport]'"
        ) from error
    plan, log = ot.emd(np.full(p, 1 / p), np.full(q, 1 / q), np.ascontiguousarray(cost), numItermax=STEPS, log=True)
    if log["warning"] is not None:
        raise ValueError(f"soft_match_distance found no optimal transport of {p} to {q} neurons: {log['warning']}")
    return np.asarray(plan)


@by_correlation(chance="above 0, at most about √(2 log p / n)", aligned_by=MATCH_BY_CORRELATION)
def hard_correlation_match(neurons: Neurons) -> Tensor:
    """Mean correlation of neurons under the best one-to-one match, over as many as the narrower side has.

    Signed: a neuron and its negative do not match. A constant neuron has correlation 0 and counts, so rows with such
    neurons have less than 1 with themselves. At most 4096² pairs of neurons.
    """
    return neurons.matched_correlations.mean()


@by_correlation(symmetric=False, cost="n p q", chance="above 0, at most about √(2 log q / n)", aligned_by=CLOSEST)
def soft_correlation_match(neurons: Neurons) -> Tensor:
    """Correlation of each neuron of x with its most correlated neuron of y, averaged over the neurons of x.

    Signed; several neurons of x may have the same neuron of y. A constant neuron has correlation 0 and counts. At most
    4096² pairs of neurons.
    """
    return neurons.closest_correlations.mean()


@define(
    reads=PairedRows,
    bounds=(-1, 1),
    closer="up",
    invariant={"rotation", "scale"},
    differentiable=False,
    paper="hamilton2016, klabunde2025",
    cost="n p q + p q min(p, q)",
    few_rows="biased",
    chance="above 0, towards 1 as p grows past n; a common mean adds to it",
    aligned_by=UNCENTRED_ROTATION,
)
def aligned_cosine(rows: PairedRows) -> Tensor:
    """Cosine between row i of XQ and row i of Y, averaged over rows, with Q the best rotation of X onto Y.

    Rows are not centred, so a common mean counts as similarity. The narrower side is padded with zeros. Only directions
    that X and Y share are rotated onto each other: where XᵀY is singular, the rest of Q is arbitrary and adds nothing.
    """
    (x, length_x), (y, length_y) = (side.memo("row coordinates", _row_coordinates) for side in (rows.x, rows.y))
    u, shared, v = singular(x.T @ y)
    known = shared > max(x.shape[1], y.shape[1]) * torch.finfo(shared.dtype).eps * shared[0]
    products = ((x @ (u[:, known] @ v[known])) * y).sum(1)
    return (products / (length_x * length_y)).mean()


def _row_coordinates(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows up to a rotation, in at most n columns, and their lengths."""
    rows = rows.detach().double()
    lengths = rows.norm(dim=1)
    if not bool((lengths > 0).all()):
        raise ValueError(f"aligned_cosine: {int((lengths == 0).sum())} of {len(rows)} rows are zero, without direction")
    if rows.shape[1] > len(rows):
        rows = torch.linalg.qr(rows.T, mode="r").R.T
    return rows, lengths
