"""Groups of models that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...linalg import clusterings
from ...results import Array, Clusters
from ..search.plain import Whole
from ..search.views import about
from .asked import asked_of, landmarks_for
from .landmarks import held_against_some
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
        raise ValueError(f"k={count!r}: a number of clusters from 1 to {most}, or None" + _of(used))
    notes = ["Average linkage on 1 − similarity, estimated from the short vectors."]
    if used is None:
        groups = of_all(square(mapped), count)
    else:
        groups = of_some(*held_against_some(mapped, used, seed), count)
        notes.append(
            f"Approximate, as always above {MOST_WHOLE:,} models: that is done with {used:,} of them, and each other "
            "model joins the group whose landmarks it is most like on average. The silhouette is that of the landmarks."
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
    labels, found = _grouped(similarity, count)
    groups = np.eye(int(labels.max()) + 1)[labels]
    sums = (similarity @ groups)[np.arange(len(labels)), labels] - similarity.diagonal()
    sizes = groups.sum(0)[labels]
    return Groups(labels, np.where(sizes > 1, sums / np.where(sizes > 1, sizes - 1, 1), 1.0), found)


def of_some(chosen: Whole, similarity: Any, count: int | None) -> Groups:
    """From the similarities of all models with those at `chosen`: these in groups, each other in the nearest one."""
    inner = similarity[chosen].astype(np.float64)
    inner = (inner + inner.T) / 2
    np.fill_diagonal(inner, 1.0)
    some = of_all(inner, count)
    groups = np.eye(int(some.labels.max()) + 1, dtype=np.float32)[some.labels]
    means = similarity @ (groups / groups.sum(0))
    labels = means.argmax(1)
    own = means.max(1).astype(np.float64)
    labels[chosen], own[chosen] = some.labels, some.own
    for group in np.flatnonzero(groups.sum(0) == 1).tolist():  # one landmark: the others are what it is like
        landmark = int(np.flatnonzero(some.labels == group)[0])
        others = np.setdiff1d(np.flatnonzero(labels == group), chosen[landmark])
        own[chosen[landmark]] = similarity[others, landmark].mean(dtype=np.float64) if len(others) else 1.0
    _, first, again = np.unique(labels, return_index=True, return_inverse=True)
    return Groups(np.argsort(np.argsort(first))[again], own, some.silhouette)


def _grouped(similarity: Array, count: int | None) -> tuple[Whole, float | None]:
    if count is not None:
        numbers = [count]
    else:
        numbers = list(range(2, min(MOST_TRIED, len(similarity) - 1) + 1)) or [1]
    tried = [labels.numpy() for labels in clusterings(torch.from_numpy(similarity), numbers)]
    inside = [2 <= number < len(similarity) for number in numbers]
    values = [silhouette(1 - similarity, one) if real else None for one, real in zip(tried, inside, strict=True)]
    best = max(range(len(tried)), key=lambda k: values[k] or 0.0)
    return tried[best], values[best]


def silhouette(distance: Array, labels: Any) -> float:
    """The mean over things of (b − a) / max(a, b): a to the own group, b to the nearest other (Rousseeuw 1987).

    0 for a thing that is a group of its own.
    """
    groups = np.eye(int(labels.max()) + 1)[labels]
    sizes = groups.sum(0)
    sums = distance @ groups
    own = sizes[labels]
    every = np.arange(len(labels))
    inner = sums[every, labels] / np.where(own > 1, own - 1, 1)
    means = sums / sizes[None]
    means[every, labels] = np.inf
    outer = means.min(1)
    largest = np.maximum(inner, outer)
    found = np.where((own > 1) & (largest > 0), (outer - inner) / np.where(largest > 0, largest, 1), 0.0)
    return float(found.mean())
