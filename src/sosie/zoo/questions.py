"""Questions about all models of a zoo: the similarity of whole models, clusters, a map, and duplicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..checks import whole_number
from ..linalg import clusterings
from ..results import Array, Clusters, Duplicates, Map
from .fingerprints import kind_of, standard_deviation
from .search import about, check_kind, none_passes
from .vectors import EXACT, Floats, Vectors, Whole

if TYPE_CHECKING:
    from .zoo import Zoo

LANDMARKS = 500  # models that stand for all if there are too many for all pairs


def vectors_of(zoo: Zoo, kind: str, **filters: Any) -> Vectors:
    """Return the vectors of a kind; "atoms" must have one set of coefficients in the zoo, or name it."""
    check_kind(zoo, kind)
    keys = [key for key in zoo.store.kinds() if kind in (key, kind_of(key)) and key != EXACT]
    if len(keys) > 1:
        raise ValueError(
            f"models with {len(keys)} different sets of coefficients, whose atoms cannot be compared: name one of "
            f"{', '.join(keys)} as the kind"
        )
    vectors = zoo.store.vectors(keys[0] if keys else kind, **filters)
    if not len(vectors.models):
        raise none_passes(zoo, filters, f"no model that passes the filters has vectors of kind {kind!r}")
    return vectors


def landmarks_for(models: int, landmarks: int | None, most_whole: int) -> int | None:
    """Return how many models stand for all; None: all pairs are compared."""
    if landmarks is None:
        count = LANDMARKS if models > most_whole else models
    else:
        count = whole_number(landmarks, "landmarks", least=3)
    return None if count >= models else count


# The similarity of whole models: every pair of two lists of models, from their short vectors

TILE = 1024  # rows compared with as many at a time: 4 MiB of cosines, which stay in the cache


def similarities(some: Vectors, others: Vectors) -> Array:
    """Return (others, some): the mean over a model's sites of the best match in the other, over both directions.

    Atoms: the mean over layers of the cosine at the same layer.
    """
    similarity = np.empty((len(others.models), len(some.models)))
    columns = [Tile.of(some, places) for places in _tiles(some)]
    for places in _tiles(others):
        rows = Tile.of(others, places)
        for tile in columns:
            similarity[np.ix_(rows.models, tile.models)] = rows.match(tile)
    return similarity


def square(vectors: Vectors) -> Array:
    """Return the similarities of all pairs: symmetric, with 1 on the diagonal."""
    similarity = np.empty((len(vectors.models), len(vectors.models)))
    tiles = [Tile.of(vectors, places) for places in _tiles(vectors)]
    for k, rows in enumerate(tiles):
        for tile in tiles[k:]:  # the other half has the same numbers
            part = rows.match(tile)
            similarity[np.ix_(tile.models, rows.models)] = part.T
            similarity[np.ix_(rows.models, tile.models)] = part
    similarity = (similarity + similarity.T) / 2  # within a tile both halves are computed, and rounded
    np.fill_diagonal(similarity, 1.0)
    return similarity


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows of some models, those with most sites first: the first row of each, then the second of each that has one …

    The best row of every model is then the maximum over whole stretches of numbers, several times as fast as a loop
    over models.
    """

    models: Whole  # their places
    rows: Floats
    stretches: tuple[tuple[int, int], ...]  # first row, number of models
    count: Array  # sites of each
    atoms: bool

    @classmethod
    def of(cls, vectors: Vectors, places: Whole) -> Tile:
        vectors.verify(places)
        first, count = vectors.first[places], vectors.count[places]
        having = [int((count > place).sum()) for place in range(int(count[0]))]
        index = np.concatenate([first[:many] + place for place, many in enumerate(having)])
        starts = np.cumsum(having) - having
        stretches = tuple(zip(starts.tolist(), having, strict=True))
        rows = np.asarray(vectors.rows)[index]
        return cls(places, rows, stretches, count.astype(np.float64), kind_of(vectors.kind) == "atoms")

    def match(self, other: Tile) -> Array:
        """Return the similarities, (models of this tile, models of the other)."""
        if self.atoms:  # one set of coefficients, so one list of layers
            if len({*self.count, *other.count}) > 1:
                raise ValueError("models that share coefficients, but have different numbers of layers with atoms")
            total = np.zeros((len(self.models), len(other.models)))
            for (a, rows), (b, columns) in zip(self.stretches, other.stretches, strict=True):
                total += self.rows[a : a + rows] @ other.rows[b : b + columns].T
            return total / len(self.stretches)
        cosines = self.rows @ other.rows.T
        forth = _summed_best(cosines, self.stretches, other.stretches) / self.count[:, None]
        back = _summed_best(cosines.T, other.stretches, self.stretches) / other.count[:, None]
        return (forth + back.T) / 2


def _summed_best(cosines: Floats, rows: Sequence[tuple[int, int]], columns: Sequence[tuple[int, int]]) -> Array:
    """Return the sum over the rows of a model of the best cosine in each model of the columns.

    Results have the memory layout of `cosines`, so a transposed view is as fast.
    """
    (_, models), *more = columns
    best = cosines[:, :models].copy(order="K")
    for start, count in more:
        np.maximum(best[:, :count], cosines[:, start : start + count], out=best[:, :count])
    total = np.zeros_like(best, np.float64, shape=(rows[0][1], models))
    for start, count in rows:
        total[:count] += best[start : start + count]
    return total


def _tiles(vectors: Vectors) -> list[Whole]:
    """Return the places of all models, those with most sites first, in groups of about `TILE` rows."""
    order = np.argsort(-vectors.count, kind="stable")
    tile = (np.cumsum(vectors.count[order]) - 1) // TILE
    return np.split(order, np.flatnonzero(np.diff(tile)) + 1)


def square_of(zoo: Zoo, kind: str, filters: dict[str, Any]) -> tuple[tuple[str, ...], Array]:
    """See `Zoo.similarities`."""
    vectors = vectors_of(zoo, kind, **filters)
    if (count := len(vectors.models)) > MOST_CLUSTERED:
        raise ValueError(
            f"the similarities of all pairs of {count:,} models: filter them to {MOST_CLUSTERED:,} or fewer"
        )
    facts, similarity = zoo.store.describe(vectors.models.tolist(), vectors.kind), square(vectors)
    kept = [k for k, model in enumerate(vectors.models.tolist()) if model in facts]  # others were removed meanwhile
    return tuple(facts[model]["name"] for model in vectors.models[kept].tolist()), similarity[np.ix_(kept, kept)]


# Landmarks: models that stand for all, some drawn at random, then those least like any of them

BLOCK = 4096  # models compared with landmarks at a time
ROUND = 50  # landmarks chosen at a time
POOL = 500  # models that these are chosen from


def compared_with_landmarks(vectors: Vectors, count: int, seed: int) -> tuple[Whole, Floats]:
    """Return the places of landmarks, and the similarity of every model with them: (models, count).

    Half are drawn by `seed`. They may miss a small group, so the rest are those farthest from all chosen before:
    `ROUND` at a time, one after the other, out of the `POOL` that are farthest.
    """
    similarity = np.empty((len(vectors.models), count), np.float32)
    near = np.full(len(vectors.models), -np.inf)
    chosen = np.empty(0, np.int64)
    new = drawn(len(vectors.models), (count + 1) // 2, seed)
    while len(new):
        columns = slice(len(chosen), len(chosen) + len(new))
        landmarks = vectors.part(new)
        for start in range(0, len(vectors.models), BLOCK):
            block = slice(start, start + BLOCK)
            similarity[block, columns] = similarities(landmarks, vectors.part(block))
        chosen = np.concatenate([chosen, new])
        near = np.maximum(near, similarity[:, columns].max(1))
        near[chosen] = np.inf
        new = farthest(vectors, near, min(ROUND, count - len(chosen)))
    return chosen, similarity


def farthest(vectors: Vectors, near: NDArray[np.float64], count: int) -> Whole:
    """Choose one by one the model least like all before; `near` is the largest similarity of each so far."""
    if not count:
        return np.empty(0, np.int64)
    size = max(POOL, count)
    pool = np.sort(np.argpartition(near, size - 1)[:size]) if size < len(near) else np.arange(len(near))
    left, inner = near[pool].copy(), square(vectors.part(pool))
    chosen: list[int] = []
    for _ in range(count):
        chosen.append(int(left.argmin()))
        left = np.maximum(left, inner[:, chosen[-1]])
        left[chosen] = np.inf
    return np.sort(pool[chosen])


# Clusters

MOST_CLUSTERED = 5000  # models of which all pairs are compared
MOST_TRIED = 20  # clusters, if their number is not given
Groups = tuple[Whole, Array, float | None]  # of each model its label and its similarity with its group; the silhouette


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
        labels, own, quality = of_all(square(vectors), count)
    else:
        labels, own, quality = of_some(*compared_with_landmarks(vectors, used, seed), count)
        notes.append(
            f"Approximate, as always above {MOST_CLUSTERED:,} models: that is done with {used:,} of them, and each "
            "other model joins the group whose landmarks it is most like on average. Similarities are with landmarks, "
            "too."
        )
    if count is None:
        notes.append(f"Their number, of 2 to {MOST_TRIED}, is that with the largest mean silhouette.")
    sizes = np.bincount(labels)
    facts = zoo.store.describe(vectors.models.tolist(), vectors.kind)
    rows, seen = [], set()
    for k in np.lexsort((np.arange(models), -own, labels)).tolist():
        label, fact = int(labels[k]), facts.get(int(vectors.models[k]))
        if fact is not None:
            row = {"name": fact["name"], "id": fact["id"], "cluster": label, "centre": label not in seen}
            row |= {"similarity": float(own[k]) if sizes[label] > 1 else None}
            rows.append(row | about(fact))
        seen.add(label)
    asked = {
        "kind": kind, "models": models, "clusters": len(sizes), "silhouette": quality,
        "chosen": count is None, "landmarks": used, "seed": seed, "probe": zoo.settings.probe, **filters,
    }  # fmt: skip
    return Clusters(asked, tuple(rows), tuple(notes))


def of_all(similarity: Array, count: int | None) -> Groups:
    """Cluster models by the similarities of all pairs."""
    return _best(similarity, count, lambda labels: measured(similarity, labels))


def measured(similarity: Array, labels: Whole) -> Groups:
    """Return groups with their similarities and silhouette."""
    own, outer = _own_and_next(similarity, labels)
    sizes = np.bincount(labels)
    real = 2 <= len(sizes) < len(labels)
    return labels, own, silhouette(1 - own, 1 - outer, sizes[labels]) if real else None


def _own_and_next(similarity: Array, labels: Whole) -> tuple[Array, Array]:
    """Return the mean similarity of each with its group (1 if alone), and with the nearest other group."""
    every = np.arange(len(labels))
    groups = np.eye(int(labels.max()) + 1)[labels]
    sums, sizes = similarity @ groups, groups.sum(0)
    others = sizes[labels] - 1
    own = (sums[every, labels] - similarity.diagonal()) / np.where(others > 0, others, 1)
    means = sums / sizes[None]
    means[every, labels] = -np.inf
    return np.where(others > 0, own, 1.0), means.max(1)


def of_some(chosen: Whole, similarity: Any, count: int | None) -> Groups:
    """Cluster the landmarks at `chosen`; every other model joins the group that is nearest by its similarities."""
    inner = similarity[chosen].astype(np.float64)
    inner = (inner + inner.T) / 2
    np.fill_diagonal(inner, 1.0)
    return _best(inner, count, lambda labels: _joined(chosen, similarity, inner, labels))


def _joined(chosen: Whole, similarity: Any, inner: Array, landmarks: Whole) -> Groups:
    """Put all models into the groups of the landmarks."""
    sizes = np.bincount(landmarks)
    weights = (np.eye(len(sizes))[landmarks] / sizes).astype(np.float32)
    labels = np.empty(len(similarity), np.int64)
    own, outer = np.empty(len(similarity)), np.full(len(similarity), -np.inf)
    for start in range(0, len(similarity), BLOCK):
        part = slice(start, start + BLOCK)
        means = similarity[part] @ weights
        labels[part] = means.argmax(1)
        own[part] = means.max(1)
        if len(sizes) > 1:
            outer[part] = np.partition(means, -2, axis=1)[:, -2]
    labels[chosen] = landmarks
    own[chosen], outer[chosen] = _own_and_next(inner, landmarks)
    for k in np.flatnonzero(sizes[landmarks] == 1):  # the only landmark of its group: compare it with the other members
        others = np.setdiff1d(np.flatnonzero(labels == landmarks[k]), chosen[k])
        own[chosen[k]] = similarity[others, k].mean(dtype=np.float64) if len(others) else 1.0
    value = silhouette(1 - own, 1 - outer, np.bincount(labels)[labels]) if len(sizes) > 1 else None
    _, first, again = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[again], own, value  # numbered by the first member


def _best(similarity: Array, count: int | None, measure: Callable[[Whole], Groups]) -> Groups:
    """Return `count` groups by Ward's linkage; None: the number of groups with the largest silhouette."""
    numbers = [count] if count is not None else list(range(2, min(MOST_TRIED, len(similarity) - 1) + 1)) or [1]
    tried = clusterings(torch.from_numpy(similarity), numbers, ward=True)
    return max((measure(labels.numpy()) for labels in tried), key=lambda groups: groups[2] or 0.0)


def silhouette(inner: Array, outer: Array, sizes: Any) -> float:
    """Return the mean of (b − a) / max(a, b): distance a to the own group, b to the nearest other (Rousseeuw 1987).

    A group of one counts as 0. `inner`, `outer`: mean distances; `sizes`: of the group of each point.
    """
    largest = np.maximum(inner, outer)
    values = np.where((sizes > 1) & (largest > 0), (outer - inner) / np.where(largest > 0, largest, 1), 0.0)
    return float(values.mean())


# A map: models as points in the plane, by classical multidimensional scaling

MOST_MAPPED = 2000  # models of which all pairs are compared


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
        landmarks_only = vectors.part(chosen)
        inner = squared_distances(square(landmarks_only))
        distances = squared_distances(similarities(landmarks_only, vectors))
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
    asked = {
        "kind": kind, "models": models, "landmarks": used, "seed": seed, "stress": stress, "shares": shares,
        "probe": zoo.settings.probe, **filters,
    }  # fmt: skip
    return Map(asked, tuple(rows), ("Distances are √(2 − 2 similarity), estimated from the short vectors.",))


def drawn(models: int, landmarks: int, seed: int) -> NDArray[np.int64]:
    """Return the places of landmarks drawn by `seed`."""
    return np.sort(np.random.default_rng(seed).choice(models, landmarks, replace=False))


def squared_distances(similarity: Array) -> Array:
    """Return 2 − 2 similarity; a similarity that rounding took past 1 has distance 0."""
    squared = 2 - 2 * similarity
    return np.where(squared > 0, squared, 0.0)


def scaled(squared: Array) -> tuple[Array, list[float]]:
    """Return points by classical scaling (Torgerson), and the share of each axis in all positive eigenvalues."""
    from scipy.linalg import eigh, eigvalsh

    rows = squared.mean(0)
    gram = -(squared - rows[None] - rows[:, None] + rows.mean()) / 2
    values = eigvalsh(gram)
    _, vectors = eigh(gram, subset_by_index=[max(len(gram) - 2, 0), len(gram) - 1])
    total = float(values[values > 0].sum())
    points = np.zeros((len(squared), 2))
    shares = [0.0, 0.0]
    for axis in range(min(2, len(values))):
        value = float(values[-1 - axis])
        if total > 0 and value > 1e-12 * total:  # less is rounding: the models lie on a line, or in a point
            points[:, axis] = vectors[:, -1 - axis] * value**0.5
            shares[axis] = value / total
    return points, shares


def placed(anchors: Array, inner: Array, squared: Array) -> Array:
    """Return points by their squared distances (models, landmarks) to `anchors` (de Silva and Tenenbaum 2004)."""
    lengths = np.square(anchors).sum(0)
    axes = np.divide(anchors, lengths[None], out=np.zeros_like(anchors), where=lengths[None] > 0)
    return np.asarray(-(squared - inner.mean(0)[None]) @ axes / 2)


def oriented(points: Array) -> Array:
    """Mirror each axis so that the point farthest out on it is on the positive side."""
    far = points[np.abs(points).argmax(0), range(2)]
    return np.where(far < 0, -points, points) + 0.0


def stress_of(points: Array, others: Array, squared: Array) -> float:
    """Return Kruskal's stress-1: the root of the summed squared errors of distances over that of the distances."""
    errors, total = 0.0, 0.0
    for start in range(0, len(points), 1000):
        here = points[start : start + 1000]
        shown = np.hypot(*(here[:, axis, None] - others[None, :, axis] for axis in range(2)))
        true = squared[start : start + 1000]
        shown -= np.sqrt(true)
        errors += float(np.vdot(shown, shown))
        total += float(true.sum())
    return float((errors / total) ** 0.5) if total else 0.0


# Duplicates: models with the same weights, or alike at every site

SAME = 1 - 1e-5
SURE = 6  # standard deviations that short vectors may deviate


def find_duplicates(zoo: Zoo, threshold: float, kind: str, filters: Mapping[str, Any]) -> Duplicates:
    """See `Zoo.duplicates`."""
    if not 0.5 <= threshold <= 1:
        raise ValueError(f"threshold must be a similarity from 0.5 to 1, got {threshold!r}")
    vectors = vectors_of(zoo, kind, **filters)
    exact = zoo.store.exact() if kind == "cka" else None
    duplicates: list[tuple[int, int, float, bool, str]] = []  # model, earlier model, similarity, by whole vectors, why
    counts = dict(zip(vectors.models.tolist(), vectors.count.tolist(), strict=True))
    first: dict[str, int] = {}
    for model, digest in zoo.store.same_digests(vectors.kind, **filters):
        if model in counts:  # else it was added meanwhile
            other = first.setdefault(digest, model)
            if other != model and counts[other] == counts[model]:
                duplicates.append((model, other, *_lowest_cosine(vectors, exact, other, model), "same weights"))
    left = vectors.part(~np.isin(vectors.models, [duplicate[0] for duplicate in duplicates]))
    off = SURE * standard_deviation(threshold, vectors.rows.shape[1]) + 1e-6  # rounding of float32
    taken: set[int] = set()  # duplicates, which no other model is compared with
    for model, others in near_models(left, threshold - off, taken):
        for other in others.tolist():
            value, by_whole = _lowest_cosine(vectors, exact, other, model)
            if value >= threshold:
                taken.add(model)
                duplicates.append((model, other, value, by_whole, "alike at every site"))
                break
    duplicates.sort(key=lambda duplicate: duplicate[0])  # ids grow in the order in which models were added
    facts = zoo.store.describe(sorted({model for duplicate in duplicates for model in duplicate[:2]}), vectors.kind)
    rows = [
        {"name": facts[model]["name"], "same_as": facts[other]["name"], "why": why, "value": value, "exact": by_whole}
        | about(facts[model])
        for model, other, value, by_whole, why in duplicates
        if model in facts and other in facts  # else one was removed meanwhile
    ]
    models = len(vectors.models)
    asked = {"kind": kind, "threshold": threshold, "models": models, "probe": zoo.settings.probe, **filters}
    note = "Alike at every site: the lowest similarity over sites, in order, is at least the threshold."
    return Duplicates(asked, tuple(rows), (note,))


def _lowest_cosine(short: Vectors, exact: Vectors | None, a: int, b: int) -> tuple[float, bool]:
    """Return the lowest cosine of two models over their sites, and whether it is of the whole vectors."""
    for vectors in (exact, short):
        if vectors is not None:
            first, second = vectors.of_model(a), vectors.of_model(b)
            if first is not None and second is not None:
                return float((first * second).sum(1).min()), vectors is exact
    raise AssertionError("both have short vectors")


# Candidates for duplicates by the short vectors: all of them, without comparing most pairs
#
# Vectors of length 1 with a cosine of c are √(2 − 2c) apart, and no farther on any axis. Models are sorted along the
# axis on which their last sites differ most, and compared only with those within that distance.

BATCH = 512  # models compared with earlier ones at a time
STRIP = 64  # of them, next to each other on the axis
MOST_OTHERS = 4096  # models that these are compared with at a time
SAMPLED = 2000  # models that determine the axis
CHECKED = 64  # candidates compared site by site at a time
ROUNDING = 1e-5  # of float32, in squared distances


def near_models(vectors: Vectors, least: float, taken: Set[int]) -> Iterator[tuple[int, Whole]]:
    """Yield each model with the earlier ones that have as many sites and a cosine of at least `least` at each.

    `taken`: models to leave out; the caller may add more between two steps.
    """
    vectors.verify()
    models = vectors.models
    if not len(models):
        return
    sampled = np.unique(np.linspace(0, len(models) - 1, min(len(models), SAMPLED)).astype(np.int64))
    centred = _last_rows(vectors, sampled)
    centred = centred - centred.mean(0)
    axis = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    before = np.empty(0, np.int64)  # places of models, sorted along the axis
    along = np.empty(0)
    longest = 0.0  # squared: files from others have vectors of nearly length 1
    for start in range(0, len(models), BATCH):
        block = np.arange(start, min(start + BATCH, len(models)))
        here = _last_rows(vectors, block)
        at = (here @ axis).astype(np.float64)
        longest = max(longest, float(np.square(here).sum(1).max()))
        radius = (max(2 * longest - 2 * least, 0.0) + ROUNDING) ** 0.5
        inside = np.argwhere(np.tril(_close(vectors, least, block, here, block), -1))
        pairs = [(inside[:, 0], block[inside[:, 1]])]  # places in the block, and among all
        for strip in np.split(np.argsort(at), range(STRIP, len(block), STRIP)):
            first = int(np.searchsorted(along, at[strip[0]] - radius))
            stop = int(np.searchsorted(along, at[strip[-1]] + radius, side="right"))
            for reach in range(first, stop, MOST_OTHERS):
                others = before[reach : min(reach + MOST_OTHERS, stop)]
                a, b = np.nonzero(_close(vectors, least, block[strip], here[strip], others))
                pairs.append((strip[a], others[b]))
        a, b = (np.concatenate(places) for places in zip(*pairs, strict=True))
        for k in np.unique(a).tolist():
            others = np.sort(b[a == k])
            others = others[[int(model) not in taken for model in models[others]]]
            if len(others := _near_everywhere(vectors, least, start + k, others)):
                yield int(models[start + k]), models[others]
        left = np.array([int(model) not in taken for model in models[block]], bool)
        before, along = np.concatenate([before, block[left]]), np.concatenate([along, at[left]])
        order = np.argsort(along, kind="stable")
        before, along = before[order], along[order]


def _last_rows(vectors: Vectors, places: Whole) -> Floats:
    """Return the vectors of the last sites."""
    return np.asarray(vectors.rows[vectors.first[places] + vectors.count[places] - 1])


def _close(vectors: Vectors, least: float, some: Whole, here: Floats, others: Whole) -> NDArray[np.bool_]:
    """Return which models have as many sites as others and are near them at the last one: (some, others)."""
    close: NDArray[np.bool_] = here @ _last_rows(vectors, others).T >= least
    close &= vectors.count[some][:, None] == vectors.count[others][None]
    return close


def _near_everywhere(vectors: Vectors, least: float, place: int, others: Whole) -> Whole:
    """Return those of the others that are near a model at every site."""
    first, count = vectors.first, int(vectors.count[place])
    model = vectors.rows[first[place] : first[place] + count]
    near = [np.empty(0, np.int64)]
    for start in range(0, len(others), CHECKED):
        part = others[start : start + CHECKED]
        rows: Array = np.asarray(vectors.rows[first[part][:, None] + np.arange(count)[None]])
        near.append(part[(rows * model[None]).sum(2).min(1) >= least])
    return np.concatenate(near)
