"""Groups of models that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...linalg import clusterings
from ...results import Array, Clusters
from ..search.plain import Whole
from ..search.views import about
from .asked import asked_of, landmarks_for
from .landmarks import BLOCK, held_against_some
from .similarities import mapped_of, square

if TYPE_CHECKING:
    from ..asking import Asking

MOST_WHOLE = 5000  # models of which all pairs are held
MOST_TRIED = 20  # clusters, where their number is not given


@dataclass(frozen=True, eq=False)
class Groups:
    labels: Whole  # of each model
    own: Array  # similarity of each with the others of its group
    silhouette: float | None


def find_clusters(
    zoo: Asking, count: int | None, kind: str, seed: int, landmarks: int | None, filters: dict[str, Any]
) -> Clusters:
    """See `Zoo.clusters`."""
    mapped = mapped_of(zoo, kind, **filters)
    models = len(mapped.models)
    used = landmarks_for(models, landmarks, MOST_WHOLE)
    most = models if used is None else used
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most):
        raise ValueError(f"{count!r} clusters: a number from 1 to {most}, or none given" + _of(used))
    notes = ["Ward's linkage on distances √(2 − 2 similarity), estimated from the short vectors."]
    if used is None:
        groups = of_all(square(mapped), count)
    else:
        groups = of_some(*held_against_some(mapped, used, seed), count)
        notes.append(
            f"Approximate, as always above {MOST_WHOLE:,} models: that is done with {used:,} of them, and each other "
            "model joins the group whose landmarks it is most like on average. Similarities are with landmarks, too."
        )
    if count is None:
        notes.append(f"Their number, of 2 to {MOST_TRIED}, is that with the largest mean silhouette.")
    sizes = np.bincount(groups.labels)
    facts = zoo.views.described(mapped.models.tolist(), mapped.kind)
    rows, seen = [], set()
    for k in np.lexsort((np.arange(models), -groups.own, groups.labels)).tolist():
        label, fact = int(groups.labels[k]), facts.get(int(mapped.models[k]))
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


def _of(used: int | None) -> str:
    return "" if used is None else f": they are made from {used} landmarks, and landmarks= makes it from more"


def of_all(similarity: Array, count: int | None) -> Groups:
    """From all pairs."""
    tried = clusterings(torch.from_numpy(similarity), _numbers(count, len(similarity)), ward=True)
    return _best([measured(similarity, labels.numpy()) for labels in tried])


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
    tried = clusterings(torch.from_numpy(inner), _numbers(count, len(inner)), ward=True)
    return _best([_joined(chosen, similarity, inner, labels.numpy()) for labels in tried])


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


def _numbers(count: int | None, things: int) -> list[int]:
    """Of clusters, that are tried."""
    return [count] if count is not None else list(range(2, min(MOST_TRIED, things - 1) + 1)) or [1]


def _best(tried: Sequence[Groups]) -> Groups:
    return max(tried, key=lambda one: one.silhouette or 0.0)


def silhouette(inner: Array, outer: Array, sizes: Any) -> float:
    """The mean over things of (b − a) / max(a, b): a to the own group, b to the nearest other (Rousseeuw 1987).

    0 for a thing that is a group of its own. `inner`, `outer`: mean distances; `sizes` of each thing's group.
    """
    largest = np.maximum(inner, outer)
    found = np.where((sizes > 1) & (largest > 0), (outer - inner) / np.where(largest > 0, largest, 1), 0.0)
    return float(found.mean())
