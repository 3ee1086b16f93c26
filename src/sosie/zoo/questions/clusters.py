"""Groups of models that are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...linalg import cluster
from ...results import Array, Clusters
from .similarities import mapped_of, square

if TYPE_CHECKING:
    from ..asking import Asking

MOST_MODELS = 5000  # all pairs are held
MOST_TRIED = 20  # clusters, where their number is not given


def find_clusters(zoo: Asking, count: int | None, kind: str, filters: dict[str, Any]) -> Clusters:
    """See `Zoo.clusters`."""
    mapped = mapped_of(zoo, kind, **filters)
    models = len(mapped.models)
    if models > MOST_MODELS:
        raise ValueError(
            f"{models:,} models, but clusters are made of all pairs of at most {MOST_MODELS:,}: choose some with tag=, "
            "architecture= or task="
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= models):
        raise ValueError(f"k={count!r}: a number of clusters from 1 to {models}, or None")
    similarity = square(mapped)
    labels, silhouette = _grouped(similarity, count)
    own = _within(similarity, labels)
    facts = zoo.store.described(mapped.models.tolist(), mapped.kind)
    centres = {int(np.where(labels == one, own, -np.inf).argmax()) for one in set(labels.tolist())}
    rows = []
    for k in np.lexsort((np.arange(models), -own, labels)).tolist():
        if (fact := facts.get(int(mapped.models[k]))) is None:
            continue
        row = {"name": fact["name"], "id": fact["id"], "cluster": int(labels[k]), "centre": k in centres}
        row |= {"similarity": float(own[k]) if (labels == labels[k]).sum() > 1 else None}
        rows.append(row | {name: fact[name] for name in ("architecture", "parameters", "task", "tags", "parent")})
    asked = {
        "kind": kind, "models": models, "clusters": len(centres), "silhouette": silhouette, "chosen": count is None,
        "probe": zoo.settings.probe, **{name: value for name, value in filters.items() if value is not None},
    }  # fmt: skip
    notes = ["Average linkage on 1 − similarity, estimated from the short vectors."]
    if count is None:
        notes.append(f"Their number, of 2 to {MOST_TRIED}, is that with the largest mean silhouette.")
    return Clusters(asked, tuple(rows), tuple(notes))


def _grouped(similarity: Array, count: int | None) -> tuple[Any, float | None]:
    def of(number: int) -> tuple[Any, float | None]:
        labels = cluster(torch.from_numpy(similarity), number).numpy()
        return labels, silhouette(1 - similarity, labels) if 2 <= number < len(labels) else None

    if count is not None:
        return of(count)
    if len(similarity) < 3:
        return of(1)
    tried = [of(number) for number in range(2, min(MOST_TRIED, len(similarity) - 1) + 1)]
    return max(tried, key=lambda one: one[1] or 0.0)


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


def _within(similarity: Array, labels: Any) -> Array:
    """The mean similarity with the others of the group; 1 for one alone."""
    groups = np.eye(int(labels.max()) + 1)[labels]
    sizes = groups.sum(0)[labels]
    sums = (similarity @ groups)[np.arange(len(labels)), labels] - similarity.diagonal()
    return np.where(sizes > 1, sums / np.where(sizes > 1, sizes - 1, 1), 1.0)
