"""Questions about all models of a zoo: how alike they are as wholes, the groups that they form, and a map of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..checks import whole_number
from ..linalg import clusterings
from ..results import Array, Clusters, Map
from .fingerprints import kind_of
from .search import about, check_kind, none_passes
from .vectors import EXACT, Floats, Vectors, Whole

if TYPE_CHECKING:
    from .zoo import Zoo

LANDMARKS = 500  # models that stand for all where there are too many for all pairs


def asked_of(zoo: Zoo, question: dict[str, Any], filters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The question with the probe set and the filters that were given."""
    return {**question, "probe": zoo.settings.probe, **(filters or {})}


def vectors_of(zoo: Zoo, kind: str, **filters: Any) -> Vectors:
    """The vectors of a kind; of atoms those of the one set of coefficients that there is, or that is named."""
    check_kind(zoo, kind)
    keys = [key for key in zoo.store.kinds() if kind in (key, kind_of(key)) and key != EXACT]
    if len(keys) > 1:
        raise ValueError(
            f"models with {len(keys)} different sets of coefficients, whose atoms have nothing in common: name one of "
            f"{', '.join(keys)} as the kind"
        )
    vectors = zoo.store.vectors(keys[0] if keys else kind, **filters)
    if not len(vectors.models):
        raise none_passes(zoo, filters, f"no model that passes the filters has vectors of kind {kind!r}")
    return vectors


def landmarks_for(models: int, given: int | None, most_whole: int) -> int | None:
    """How many models stand for all; None where all pairs are looked at."""
    if given is not None:
        whole_number(given, "landmarks", least=3)
    count = given if given is not None else (LANDMARKS if models > most_whole else models)
    return None if count >= models else count


# How alike models are as wholes: every pair of two lists of them, from their short vectors

TILE = 1024  # rows that are held against as many at a time: 4 MiB of cosines, which stay in the cache


def similarities(some: Vectors, others: Vectors) -> Array:
    """(others, some): the mean over a model's sites of the best match among the other's, averaged over both ways.

    Atoms: the mean over layers of the cosine at the same layer.
    """
    found = np.empty((len(others.models), len(some.models)))
    columns = [Tile.of(some, chosen) for chosen in _tiles(some)]
    for chosen in _tiles(others):
        rows = Tile.of(others, chosen)
        for tile in columns:
            found[np.ix_(rows.models, tile.models)] = rows.match(tile)
    return found


def square(vectors: Vectors) -> Array:
    """All pairs, symmetric, with 1 for each with itself."""
    found = np.empty((len(vectors.models), len(vectors.models)))
    tiles = [Tile.of(vectors, chosen) for chosen in _tiles(vectors)]
    for k, rows in enumerate(tiles):
        for tile in tiles[k:]:  # the other half is the same numbers
            part = rows.match(tile)
            found[np.ix_(tile.models, rows.models)] = part.T
            found[np.ix_(rows.models, tile.models)] = part
    found = (found + found.T) / 2  # within a tile both are worked out, and rounded
    np.fill_diagonal(found, 1.0)
    return found


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows of some models, those with most sites first: the first row of each, then the second of each that has one …

    So the best of a model's rows is the largest of whole stretches of numbers, which is several times as fast as to
    look through each model's own.
    """

    models: Whole  # where they are among all
    rows: Floats
    stretches: tuple[tuple[int, int], ...]  # from which row on, of how many models
    count: Array  # sites of each
    atoms: bool

    @classmethod
    def of(cls, vectors: Vectors, chosen: Whole) -> Tile:
        vectors.verify(chosen)
        first, count = vectors.first[chosen], vectors.count[chosen]
        having = [int((count > place).sum()) for place in range(int(count[0]))]
        index = np.concatenate([first[:many] + place for place, many in enumerate(having)])
        starts = np.cumsum(having) - having
        stretches = tuple(zip(starts.tolist(), having, strict=True))
        rows = np.asarray(vectors.rows)[index]
        return cls(chosen, rows, stretches, count.astype(np.float64), kind_of(vectors.kind) == "atoms")

    def match(self, other: Tile) -> Array:
        """(models of this one, of the other)."""
        if self.atoms:
            return self._same_place(other)
        cosines = self.rows @ other.rows.T
        (_, many), *more = other.stretches
        best = cosines[:, :many].copy()  # (rows, models of the other)
        for start, some in more:
            np.maximum(best[:, :some], cosines[:, start : start + some], out=best[:, :some])
        forth = np.zeros((len(self.models), len(other.models)))
        for start, some in self.stretches:
            forth[:some] += best[start : start + some]
        (_, many), *more = self.stretches
        best = cosines[:many].copy()  # (models, rows of the other)
        for start, some in more:
            np.maximum(best[:some], cosines[start : start + some], out=best[:some])
        back = np.zeros_like(forth)
        for start, some in other.stretches:
            back[:, :some] += best[:, start : start + some]
        return (forth / self.count[:, None] + back / other.count[None]) / 2

    def _same_place(self, other: Tile) -> Array:
        """One set of coefficients, so one list of layers: every model has as many."""
        if len({*self.count, *other.count}) > 1:
            raise ValueError("models that share coefficients, but have different numbers of layers with atoms")
        pairs = zip(self.stretches, other.stretches, strict=True)
        total = np.zeros((len(self.models), len(other.models)))
        for (a, many), (b, others) in pairs:
            total += self.rows[a : a + many] @ other.rows[b : b + others].T
        return total / len(self.stretches)


def _tiles(vectors: Vectors) -> list[Whole]:
    """All models, those with most sites first, about `TILE` rows at a time."""
    order = np.argsort(-vectors.count, kind="stable")
    tile = (np.cumsum(vectors.count[order]) - 1) // TILE
    return np.split(order, np.flatnonzero(np.diff(tile)) + 1)


# A few models that stand for all: some drawn, then those that are least like any of them

BLOCK = 4096  # models that are held against landmarks at a time
ROUND = 50  # landmarks that are taken at a time
POOL = 500  # models that these are taken from


def held_against_some(vectors: Vectors, count: int, seed: int) -> tuple[Whole, Floats]:
    """Where landmarks are among the models, and the similarity of each model with them: (models, count).

    Half are drawn by `seed`. Of a group with few members none may be among these, so the rest are those farthest from
    all that were taken before: `ROUND` at a time, one after the other, out of the `POOL` that are farthest.
    """
    random = np.random.default_rng(seed)
    drawn = np.sort(random.choice(len(vectors.models), (count + 1) // 2, replace=False))
    similarity = np.empty((len(vectors.models), count), np.float32)
    near = np.full(len(vectors.models), -np.inf)
    chosen = np.empty(0, np.int64)
    new = drawn
    while len(new):
        columns = slice(len(chosen), len(chosen) + len(new))
        hold(vectors, new, similarity[:, columns])
        chosen = np.concatenate([chosen, new])
        near = np.maximum(near, similarity[:, columns].max(1))
        near[chosen] = np.inf
        new = farthest(vectors, near, min(ROUND, count - len(chosen)))
    return chosen, similarity


def hold(vectors: Vectors, chosen: Whole, into: Any) -> None:
    """The similarities of all models with some, a block at a time."""
    some = vectors.part(chosen)
    for start in range(0, len(vectors.models), BLOCK):
        into[start : start + BLOCK] = similarities(some, vectors.part(slice(start, start + BLOCK)))


def farthest(vectors: Vectors, near: NDArray[np.float64], count: int) -> Whole:
    """One after the other the model that is least like all before; `near`: the largest similarity of each so far."""
    if not count:
        return np.empty(0, np.int64)
    some = max(POOL, count)
    pool = np.sort(np.argpartition(near, some - 1)[:some]) if some < len(near) else np.arange(len(near))
    left, inner = near[pool].copy(), square(vectors.part(pool))
    found = []
    for _ in range(count):
        found.append(int(left.argmin()))
        left = np.maximum(left, inner[:, found[-1]])
        left[found] = np.inf
    return np.sort(pool[found])


# Groups of models that are alike

MOST_CLUSTERED = 5000  # models of which all pairs are held
MOST_TRIED = 20  # clusters, where their number is not given


class Groups(NamedTuple):
    """Models in groups, and what these are worth."""

    labels: Whole  # of each model
    own: Array  # similarity of each with the others of its group
    silhouette: float | None


def find_clusters(
    zoo: Zoo, count: int | None, kind: str, seed: int, landmarks: int | None, filters: dict[str, Any]
) -> Clusters:
    """See `Zoo.clusters`."""
    vectors = vectors_of(zoo, kind, **filters)
    models = len(vectors.models)
    used = landmarks_for(models, landmarks, MOST_CLUSTERED)
    most = models if used is None else used
    if count is not None:
        why = "" if used is None else f"they are made from {used} landmarks, and landmarks= makes it from more"
        whole_number(count, "the number of clusters", least=1, most=most, why=why)
    notes = ["Ward's linkage on distances √(2 − 2 similarity), estimated from the short vectors."]
    if used is None:
        groups = of_all(square(vectors), count)
    else:
        groups = of_some(*held_against_some(vectors, used, seed), count)
        notes.append(
            f"Approximate, as always above {MOST_CLUSTERED:,} models: that is done with {used:,} of them, and each "
            "other model joins the group whose landmarks it is most like on average. Similarities are with landmarks, "
            "too."
        )
    if count is None:
        notes.append(f"Their number, of 2 to {MOST_TRIED}, is that with the largest mean silhouette.")
    sizes = np.bincount(groups.labels)
    facts = zoo.store.describe(vectors.models.tolist(), vectors.kind)
    rows, seen = [], set()
    for k in np.lexsort((np.arange(models), -groups.own, groups.labels)).tolist():
        label, fact = int(groups.labels[k]), facts.get(int(vectors.models[k]))
        if fact is not None:
            row = {"name": fact["name"], "id": fact["id"], "cluster": label, "centre": label not in seen}
            row |= {"similarity": float(groups.own[k]) if sizes[label] > 1 else None}
            rows.append(row | about(fact))
        seen.add(label)
    asked = {
        "kind": kind, "models": models, "clusters": len(sizes), "silhouette": groups.silhouette,
        "chosen": count is None, "landmarks": used, "seed": seed,
    }  # fmt: skip
    return Clusters(asked_of(zoo, asked, filters), tuple(rows), tuple(notes))


def of_all(similarity: Array, count: int | None) -> Groups:
    """From all pairs."""
    return _best(similarity, count, lambda labels: measured(similarity, labels))


def measured(similarity: Array, labels: Whole) -> Groups:
    """Groups with what they are worth."""
    own, outer = _own_and_next(similarity, labels)
    sizes = np.bincount(labels)
    real = 2 <= len(sizes) < len(labels)
    return Groups(labels, own, silhouette(1 - own, 1 - outer, sizes[labels]) if real else None)


def _own_and_next(similarity: Array, labels: Whole) -> tuple[Array, Array]:
    """The mean similarity of each with the others of its group (1 for one alone), and with the nearest other group."""
    every = np.arange(len(labels))
    groups = np.eye(int(labels.max()) + 1)[labels]
    sums, sizes = similarity @ groups, groups.sum(0)
    others = sizes[labels] - 1
    own = (sums[every, labels] - similarity.diagonal()) / np.where(others > 0, others, 1)
    means = sums / sizes[None]
    means[every, labels] = -np.inf
    return np.where(others > 0, own, 1.0), means.max(1)


def of_some(chosen: Whole, similarity: Any, count: int | None) -> Groups:
    """From the similarities of all models with those at `chosen`: these in groups, each other in the nearest one."""
    inner = similarity[chosen].astype(np.float64)
    inner = (inner + inner.T) / 2
    np.fill_diagonal(inner, 1.0)
    return _best(inner, count, lambda labels: _joined(chosen, similarity, inner, labels))


def _joined(chosen: Whole, similarity: Any, inner: Array, landmarks: Whole) -> Groups:
    """All models in the groups of the landmarks."""
    sizes = np.bincount(landmarks)
    turned = (np.eye(len(sizes))[landmarks] / sizes).astype(np.float32)
    labels = np.empty(len(similarity), np.int64)
    own, outer = np.empty(len(similarity)), np.full(len(similarity), -np.inf)
    for start in range(0, len(similarity), BLOCK):
        part = slice(start, start + BLOCK)
        means = similarity[part] @ turned
        labels[part] = means.argmax(1)
        own[part] = means.max(1)
        if len(sizes) > 1:
            outer[part] = np.partition(means, -2, axis=1)[:, -2]
    labels[chosen] = landmarks
    own[chosen], outer[chosen] = _own_and_next(inner, landmarks)
    for k in np.flatnonzero(sizes[landmarks] == 1):  # the only one of its group: the others are what it is like
        others = np.setdiff1d(np.flatnonzero(labels == landmarks[k]), chosen[k])
        own[chosen[k]] = similarity[others, k].mean(dtype=np.float64) if len(others) else 1.0
    value = silhouette(1 - own, 1 - outer, np.bincount(labels)[labels]) if len(sizes) > 1 else None
    _, first, again = np.unique(labels, return_index=True, return_inverse=True)
    return Groups(np.argsort(np.argsort(first))[again], own, value)  # numbered by the first member


def _best(similarity: Array, count: int | None, measure: Callable[[Whole], Groups]) -> Groups:
    """So many groups by Ward's linkage, or the number of them that has the largest silhouette."""
    numbers = [count] if count is not None else list(range(2, min(MOST_TRIED, len(similarity) - 1) + 1)) or [1]
    tried = clusterings(torch.from_numpy(similarity), numbers, ward=True)
    return max((measure(labels.numpy()) for labels in tried), key=lambda groups: groups.silhouette or 0.0)


def silhouette(inner: Array, outer: Array, sizes: Any) -> float:
    """The mean over things of (b − a) / max(a, b): a to the own group, b to the nearest other (Rousseeuw 1987).

    0 for a thing that is a group of its own. `inner`, `outer`: mean distances; `sizes` of each thing's group.
    """
    largest = np.maximum(inner, outer)
    found = np.where((sizes > 1) & (largest > 0), (outer - inner) / np.where(largest > 0, largest, 1), 0.0)
    return float(found.mean())


# A map: models as points in the plane, by classical multidimensional scaling

MOST_MAPPED = 2000  # models of which all pairs are taken


def lay_out(zoo: Zoo, kind: str, seed: int, landmarks: int | None, filters: dict[str, Any]) -> Map:
    """See `Zoo.map`."""
    vectors = vectors_of(zoo, kind, **filters)
    models = len(vectors.models)
    used = landmarks_for(models, landmarks, MOST_MAPPED)
    if used is None:
        distances = squared_distances(square(vectors))
        points, shares = scaled(distances)
        stress = stress_of(points, points, distances)
    else:
        chosen = drawn(models, used, seed)
        some = vectors.part(chosen)
        inner = squared_distances(square(some))
        distances = squared_distances(similarities(some, vectors))
        anchors, shares = scaled(inner)
        points = placed(anchors, inner, distances)
        stress = stress_of(points, points[chosen], distances)
    points = oriented(points)
    facts = zoo.store.describe(vectors.models.tolist(), vectors.kind)
    rows = [
        {"name": facts[model]["name"], "id": model, "x": x, "y": y} | about(facts[model])
        for model, (x, y) in zip(vectors.models.tolist(), points.tolist(), strict=True)
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
