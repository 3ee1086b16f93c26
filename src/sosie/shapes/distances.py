"""Networks of which only the distances are known: `compare([m1, m2, …]).matrix("procrustes_angle")`, or a zoo."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..capture import number_array
from ..checks import whole_number

Array = NDArray[np.float64]


def medoids(distances: Any, groups: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items in `groups` groups, each around one of them, with the least sum of distances (N, N) to these.

    Returns the group of each item and the item at the centre of each group (its medoid); groups are numbered by their
    first member. k-means needs the rows themselves (`kmeans`): a mean has no row in a matrix of distances. Medoids are
    added one by one, then swapped as long as that lowers the sum (partitioning around medoids).
    """
    far = _checked(distances)
    whole_number(groups, "groups", least=1, most=len(far), why=f"there are {len(far)} items")
    chosen = [int(far.sum(0).argmin())]
    while len(chosen) < groups:
        sums = np.minimum(far[:, chosen].min(1, keepdims=True), far).sum(0)
        sums[chosen] = np.inf
        chosen.append(int(sums.argmin()))
    total = far[:, chosen].min(1).sum()
    while True:
        best = (total, chosen)
        for place in range(groups):
            others = chosen[:place] + chosen[place + 1 :]
            near = far[:, others].min(1, keepdims=True) if others else np.full((len(far), 1), np.inf)
            sums = np.minimum(near, far).sum(0)
            if sums.min() < best[0] * (1 - 1e-12):
                best = (sums.min(), [*others, int(sums.argmin())])
        if best[1] is chosen:
            break
        total, chosen = best
    labels = far[:, chosen].argmin(1)
    labels[chosen] = np.arange(groups)  # equal items may be at two medoids
    order = list(dict.fromkeys(labels.tolist()))
    return np.array([order.index(label) for label in labels.tolist()]), np.array(chosen)[order]


def spherical_mds(angles: Any, dimensions: int = 2) -> tuple[Array, float]:
    """Items as points (N, dimensions + 1) on the unit sphere, with given angles (N, N) between them, and the stress.

    For distances that are angles, such as `procrustes_angle`: on a sphere they can be exact where no plane is. Starts
    from the leading eigenvectors of the cosines and then lowers the squared errors of the angles; the stress is
    Kruskal's stress-1: 0 if all angles are exact, and above 0.2 the map is a rough sketch.
    """
    from scipy.optimize import minimize

    true = _checked(angles)
    whole_number(dimensions, "dimensions", least=1)
    if (largest := float(true.max())) > np.pi + 1e-9:  # more than rounding
        raise ValueError(f"angles go from 0 to π, got {largest:g}; take arccos of similarities that are cosines")
    values, vectors = np.linalg.eigh(np.cos(true))
    width = min(dimensions + 1, len(true))
    start = np.zeros((len(true), dimensions + 1))
    start[:, :width] = (vectors[:, ::-1] * np.sqrt(values[::-1].clip(0)))[:, :width]
    lost = ~(np.square(start).sum(1) > 0)
    start[lost, 0] = 1.0

    def error(flat: Array) -> tuple[float, Array]:
        free = flat.reshape(start.shape)
        lengths = np.linalg.norm(free, axis=1, keepdims=True)
        points = free / lengths
        missed = _angles(points) - true
        sines = np.sin(missed + true)
        # Equal and opposite points have no direction in which their angle grows.
        pull = np.divide(missed, sines, out=np.zeros_like(sines), where=sines > 1e-9)
        slope = -2 * pull @ points
        return float(np.square(missed).sum() / 2), (
            (slope - (slope * points).sum(1, keepdims=True) * points) / lengths
        ).ravel()

    found = minimize(
        error, start.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-15, "gtol": 1e-10}
    )
    points = found.x.reshape(start.shape)
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    total = float(np.square(true).sum())
    return points, float((np.square(_angles(points) - true).sum() / total) ** 0.5) if total else 0.0


def _angles(points: Array) -> Array:
    """(N, N), exact for close points too."""
    apart = sum(np.square(column[:, None] - column[None]) for column in points.T)
    together = sum(np.square(column[:, None] + column[None]) for column in points.T)
    return np.asarray(2 * np.arctan2(np.sqrt(apart), np.sqrt(together)))


def _checked(distances: Any) -> Array:
    far = number_array(distances, "distances").astype(np.float64)
    if far.ndim != 2 or far.shape[0] != far.shape[1] or len(far) < 2:
        raise ValueError(f"need the distances of all pairs of at least two networks, (N, N), got {far.shape}")
    if not np.isfinite(far).all():
        raise ValueError(f"{int((~np.isfinite(far)).sum())} distances are NaN or infinite")
    size = np.abs(far).max()
    if far.min() < 0 or np.abs(far - far.T).max() > 1e-6 * size or np.abs(np.diagonal(far)).max() > 1e-6 * size:
        raise ValueError(
            "distances are symmetric, at least 0, and 0 on the diagonal; are these similarities? Take 1 − similarity, "
            "or arccos of cosines"
        )
    far = (far + far.T) / 2
    np.fill_diagonal(far, 0.0)
    return far
