"""Shape space: networks as points, each the rows of one site up to a rotation, under Procrustes distances.

With `scale`, rows are scaled to unit norm and the distance is `procrustes_angle`; without it, it is
`raw_procrustes_distance`. Rows are centred in both. Narrower networks are padded with neurons that are always 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..capture import number_array
from ..checks import whole_number
from ..linalg import centred, near_one, singular, with_room
from ..process_state import torch_on_one_core

Array = NDArray[np.float64]
STEPS = 1000  # of the iteration to a mean
STILL = 1e-8  # a step to the mean that is shorter, as a share of the mean's length, is the last
STARTS = 10  # of k-means, of which the best is taken


@dataclass(frozen=True)
class MeanShape:
    """The Fréchet mean of networks: the point with the least mean squared distance to them."""

    shape: Array  # (n, k) the mean
    aligned: Array  # (networks, n, k) each network, rotated onto the mean
    distances: Array  # (networks,) from the mean
    steps: int  # that it took

    def __repr__(self) -> str:
        n, k = self.shape.shape
        return f"<MeanShape of {len(self.distances)} networks: {n} stimuli, {k} columns, variance {self.variance:.4g}>"

    @property
    def variance(self) -> float:
        """The mean squared distance to the mean."""
        return float(np.square(self.distances).mean())


@torch_on_one_core()
def mean_shape(networks: Iterable[Any], *, scale: bool = True) -> MeanShape:
    """The Fréchet mean (barycentre) of networks, each an array (n, p) of rows of the same n stimuli.

    Generalised Procrustes analysis: all networks are rotated onto the mean and averaged, until it stays. It starts
    from the principal components of all networks side by side, so their order does not matter. The mean has the columns
    of the widest network, at most n. Networks that are far apart may have several local means, of which it finds one.
    """
    points = _points(networks, scale)
    mean, steps = _mean(points, scale)
    aligned = _rotated(points, mean)
    distances = _norms(_log(mean, aligned, scale))
    return MeanShape(mean.numpy(), aligned.numpy(), distances.numpy(), steps)


@torch_on_one_core()
def geodesic(x: Any, y: Any, at: float | Sequence[float] = 0.5, *, scale: bool = True) -> Array:
    """The points of the shortest path from x (n, p) to y (n, q), in the neurons of x.

    At 0 it is x, at 1 y rotated onto x. (n, k) for one number, with k the larger width; (numbers, n, k) for several.
    With `scale` it is an arc of a great circle, without it a straight line. Distances along it grow with `at`.
    """
    steps = np.asarray(at, dtype=np.float64)
    if steps.ndim > 1 or not bool(((steps >= 0) & (steps <= 1)).all()):
        raise ValueError(f"at goes from 0 (x) to 1 (y), one number or several, got {at!r}")
    start, end = _points([x, y], scale, shorten=False)
    direction = _log(start, _rotated(end, start), scale)
    path = torch.stack([_exp(start, step * direction, scale) for step in steps.reshape(-1).tolist()])
    return path.reshape(*steps.shape, *start.shape).numpy()


@torch_on_one_core()
def tangent_pca(networks: Iterable[Any], components: int = 2, *, scale: bool = True) -> tuple[Array, Array, Array]:
    """Principal components of networks in the tangent space at their mean.

    Returns coordinates (networks, components), the share of the variance of each component, and the directions
    (components, n, k), which are orthonormal: `mean_shape(networks).shape + 2 * directions[0]` is two units along the
    first (to first order with `scale`). The distance of a network from the mean is kept, those between networks are
    approximate, the better the closer they all are.
    """
    points = _points(networks, scale)
    whole_number(components, "components", least=1, most=len(points) - 1, why=f"{len(points)} networks have no more")
    mean, _ = _mean(points, scale)
    tangents = _log(mean, _rotated(points, mean), scale).flatten(1)
    coordinates, sizes, directions = singular(tangents - tangents.mean(0))
    coordinates = coordinates * sizes
    far = coordinates.abs().argmax(0)
    signs = torch.where(coordinates[far, torch.arange(len(far))] < 0, -1.0, 1.0)  # the farthest is on the positive side
    total = float(sizes.square().sum())
    shares = sizes.square() / total if total > 0 else torch.zeros_like(sizes)
    return (
        (coordinates * signs)[:, :components].numpy(),
        shares[:components].numpy(),
        (directions * signs[:, None])[:components].reshape(components, *mean.shape).numpy(),
    )


@torch_on_one_core()
def kmeans(
    networks: Iterable[Any], groups: int, *, scale: bool = True, seed: int = 0
) -> tuple[NDArray[np.int64], Array, float]:
    """Networks in `groups` groups around their means (Lloyd's algorithm, in shape space).

    Returns the group of each network, numbered by its first member, the means (groups, n, k) and the sum of squared
    distances to them. The best of 10 starts that are drawn by `seed` (k-means++). Where only distances are known, take
    `medoids`.
    """
    points = _points(networks, scale)
    whole_number(groups, "groups", least=1, most=len(points), why=f"there are {len(points)} networks")
    random = np.random.default_rng(seed)
    labels, means, total = min((_lloyd(points, groups, scale, random) for _ in range(STARTS)), key=lambda each: each[2])
    order = list(dict.fromkeys(labels.tolist()))
    return np.array([order.index(label) for label in labels.tolist()]), means[order].numpy(), total


def _lloyd(points: Tensor, groups: int, scale: bool, random: np.random.Generator) -> tuple[Tensor, Tensor, float]:
    means = points[int(random.integers(len(points)))][None]
    while len(means) < groups:
        nearest = _squared_distances(points, means, scale).amin(1)
        weights = nearest.numpy() if bool(nearest.any()) else np.ones(len(points))
        means = torch.cat([means, points[int(random.choice(len(points), p=weights / weights.sum()))][None]])
    labels, total = torch.full((len(points),), -1), math.inf
    for _ in range(STEPS):
        squares = _squared_distances(points, means, scale)
        previous, total = total, float(squares.amin(1).sum())
        before, labels = labels, squares.argmin(1)
        for empty in sorted({*range(groups)} - {*labels.tolist()}):  # it takes the network farthest from its mean
            alone = labels.bincount(minlength=groups)[labels] == 1
            labels[squares.gather(1, labels[:, None])[:, 0].masked_fill(alone, -1).argmax()] = empty
        if bool((labels == before).all()) or total >= previous:  # equal networks would change places for ever
            break
        means = torch.stack([_mean(points[labels == group], scale)[0] for group in range(groups)])
    return labels, means, total


def _squared_distances(points: Tensor, means: Tensor, scale: bool) -> Tensor:
    """(points, means)"""
    return torch.stack([_norms(_log(mean, _rotated(points, mean), scale)).square() for mean in means], 1)


# Points: centred rows, all of one width


def _points(networks: Iterable[Any], scale: bool, *, shorten: bool = True) -> Tensor:
    """(networks, n, k): centred, scaled to unit norm if asked, in at most n columns if `shorten`."""
    given = [_rows(rows, f"network {k}") for k, rows in enumerate(networks)]
    if len(given) < 2:
        raise ValueError(f"need at least two networks, got {len(given)}")
    if len({len(rows) for rows in given}) > 1:
        shapes = ", ".join(str(tuple(rows.shape)) for rows in given)
        raise ValueError(f"all networks need rows of the same stimuli, got arrays of {shapes}")
    width = max(rows.shape[1] for rows in given)
    if shorten and width > len(given[0]):  # n coordinates suffice, since all that reads them ignores rotations
        given = [torch.linalg.qr(rows.T, mode="r").R.T if rows.shape[1] > len(rows) else rows for rows in given]
        width = len(given[0])
    given = [near_one(rows) if scale else with_room(rows, f"network {k}") for k, rows in enumerate(given)]
    points = torch.stack([torch.nn.functional.pad(rows, (0, width - rows.shape[1])) for rows in given])
    return points / points.norm(dim=(1, 2), keepdim=True) if scale else points


def _rows(values: Any, label: str) -> Tensor:
    rows = values.detach().cpu() if isinstance(values, Tensor) else torch.from_numpy(number_array(values, label).copy())
    if rows.ndim != 2 or rows.shape[1] == 0 or len(rows) < 2:
        raise ValueError(f"{label} must be (n, p) with at least 2 rows, got shape {tuple(rows.shape)}")
    if rows.is_complex() or not bool(rows.isfinite().all()):
        raise ValueError(f"{label} has values that are complex, NaN or infinite")
    rows = rows.double()
    about = centred(rows)
    if not bool(about.abs().max() > 1e-14 * rows.abs().max()):
        raise ValueError(f"{label} does not vary: all {len(rows)} rows are equal")
    return about


def _rotated(points: Tensor, onto: Tensor) -> Tensor:
    """Points (…, n, k), each by the rotation that brings it closest."""
    left, _, right = torch.linalg.svd(points.mT @ onto)
    return points @ (left @ right)


def _log(start: Tensor, points: Tensor, scale: bool) -> Tensor:
    """The tangents at `start` that lead to rotated points: as long as they are far."""
    if not scale:
        return points - start
    along = (points * start).sum((-2, -1), keepdim=True)
    across = points - along * start
    length = across.norm(dim=(-2, -1), keepdim=True)
    return across * torch.where(length > 0, torch.atan2(length, along) / length.clamp_min(1e-300), 0.0)


def _exp(start: Tensor, tangent: Tensor, scale: bool) -> Tensor:
    """The point at the end of a tangent."""
    if not scale:
        return start + tangent
    length = tangent.norm()
    return _onto(start * length.cos() + tangent * torch.sinc(length / torch.pi), scale)


def _onto(point: Tensor, scale: bool) -> Tensor:
    return point / point.norm() if scale else point


def _norms(tangents: Tensor) -> Tensor:
    return tangents.norm(dim=(-2, -1))


def _mean(points: Tensor, scale: bool) -> tuple[Tensor, int]:
    side_by_side = points.transpose(0, 1).flatten(1)
    vectors, sizes, _ = singular(side_by_side)
    mean = torch.zeros_like(points[0])
    count = min(points.shape[2], len(sizes))
    mean[:, :count] = vectors[:, :count] * sizes[:count] / len(points) ** 0.5
    mean = _onto(mean, scale)
    before, pace = mean, 0
    for step in range(1, STEPS + 1):
        ahead = _onto(mean + pace / (pace + 3) * (mean - before), scale)  # Nesterov's momentum
        move = _log(ahead, _rotated(points, ahead), scale).mean(0)
        before, mean = mean, _exp(ahead, move, scale)
        pace = pace + 1 if bool((move * (mean - before)).sum() > 0) else 0  # uphill: begin anew (O'Donoghue, Candès)
        if bool(move.norm() <= STILL * mean.norm()):
            return mean, step
    warnings.warn(
        f"the mean of {len(points)} networks still moves by {float(move.norm() / mean.norm()):.0e} of its length after "
        f"{STEPS} steps",
        stacklevel=4,
    )
    return mean, STEPS
