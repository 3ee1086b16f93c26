"""A map: models as points in the plane, by classical multidimensional scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...results import Array, Map
from ..search.views import about
from .asked import asked_of, landmarks_for
from .similarities import mapped_of, similarities, square

if TYPE_CHECKING:
    from ..asking import Asking

MOST_WHOLE = 2000  # models of which all pairs are taken


def lay_out(zoo: Asking, kind: str, seed: int, landmarks: int | None, filters: dict[str, Any]) -> Map:
    """See `Zoo.map`."""
    mapped = mapped_of(zoo, kind, **filters)
    models = len(mapped.models)
    used = landmarks_for(models, landmarks, MOST_WHOLE)
    if used is None:
        distances = squared_distances(square(mapped))
        points, shares = scaled(distances)
        stress = stress_of(points, points, distances)
    else:
        chosen = drawn(models, used, seed)
        some = mapped.part(chosen)
        inner = squared_distances(square(some))
        distances = squared_distances(similarities(some, mapped))
        anchors, shares = scaled(inner)
        points = placed(anchors, inner, distances)
        stress = stress_of(points, points[chosen], distances)
    points = oriented(points)
    facts = zoo.views.described(mapped.models.tolist(), mapped.kind)
    rows = [
        {"name": facts[model]["name"], "id": model, "x": x, "y": y} | about(facts[model])
        for model, (x, y) in zip(mapped.models.tolist(), points.tolist(), strict=True)
        if model in facts
    ]
    asked = {"kind": kind, "models": models, "landmarks": used, "seed": seed, "stress": stress, "shares": shares}
    note = "Distances are √(2 − 2 similarity), estimated from the short vectors."
    return Map(asked_of(zoo, asked, filters), tuple(rows), (note,))


def drawn(models: int, landmarks: int, seed: int) -> NDArray[np.int64]:
    """Places of the landmarks among the models."""
    return np.sort(np.random.default_rng(seed).choice(models, landmarks, replace=False))


def squared_distances(similarity: Array) -> Array:
    """2 − 2 similarity; a similarity that rounding took past 1 is at distance 0."""
    found = 2 - 2 * similarity
    return np.where(found > 0, found, 0.0)


def scaled(squared: Array) -> tuple[Array, list[float]]:
    """Points whose distances are nearest in Torgerson's sense, and each axis' share of all positive eigenvalues."""
    rows = squared.mean(0)
    gram = -(squared - rows[None] - rows[:, None] + rows.mean()) / 2
    values, vectors = spectrum(gram)
    total = float(values[values > 0].sum())
    points = np.zeros((len(squared), 2))
    shares = [0.0, 0.0]
    for axis in range(min(2, len(values))):
        value = float(values[-1 - axis])
        if total > 0 and value > 1e-12 * total:  # below that it is rounding: the models lie on a line, or in a point
            points[:, axis] = vectors[:, -1 - axis] * value**0.5
            shares[axis] = value / total
    return points, shares


def spectrum(symmetric: Array) -> tuple[Array, Array]:
    """All eigenvalues, smallest first, and the eigenvectors of the last two: a third of the time that all take.

    The matrix is made tridiagonal once (dsytrd), and the two vectors are turned back by the same reflections.
    """
    from scipy.linalg import eigh, eigh_tridiagonal, lapack

    n = len(symmetric)
    if n < 3:
        return eigh(symmetric)
    work = int(lapack.dsytrd_lwork(n, lower=1)[0])
    reflections, diagonal, beside, scales, wrong = lapack.dsytrd(symmetric, lower=1, lwork=work)
    assert wrong == 0, "dsytrd refuses nothing but arguments of the wrong form"
    values = eigh_tridiagonal(diagonal, beside, eigvals_only=True)
    _, inner = eigh_tridiagonal(diagonal, beside, select="i", select_range=(n - 2, n - 1))
    below = reflections[1:, :-1]
    turned, _, wrong = lapack.dormqr("L", "N", below, scales, inner[1:], work)
    assert wrong == 0, "dormqr, likewise"
    return values, np.concatenate([inner[:1], turned])


def placed(anchors: Array, inner: Array, squared: Array) -> Array:
    """Points from squared distances (models, landmarks) to landmarks at `anchors` (de Silva and Tenenbaum 2004)."""
    lengths = np.square(anchors).sum(0)
    turned = np.divide(anchors, lengths[None], out=np.zeros_like(anchors), where=lengths[None] > 0)
    found: Array = -(squared - inner.mean(0)[None]) @ turned / 2
    return found


def oriented(points: Array) -> Array:
    """An axis can be mirrored: the point farthest out on it is on the positive side."""
    far = points[np.abs(points).argmax(0), range(2)]
    return np.where(far < 0, -points, points) + 0.0


def stress_of(points: Array, others: Array, squared: Array) -> float:
    """Kruskal's stress-1: root of the summed squared errors of distances over that of the distances."""
    errors, total = 0.0, 0.0
    for start in range(0, len(points), 1000):
        here = points[start : start + 1000]
        shown = np.hypot(*(here[:, axis, None] - others[None, :, axis] for axis in range(2)))
        true = squared[start : start + 1000]
        shown -= np.sqrt(true)
        errors += float(np.vdot(shown, shown))
        total += float(true.sum())
    return float((errors / total) ** 0.5) if total else 0.0
