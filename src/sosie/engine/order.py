"""Whether the data come sorted by label, which blocks of consecutive rows cannot stand."""

from __future__ import annotations

from typing import Any

from torch import Tensor

SORTED = 0.9  # share of neighbours with one label above which data count as sorted


class LabelOrder:
    """Counts how often an input has the label of the one before it, where batches are (x, labels)."""

    def __init__(self) -> None:
        self._same = self._pairs = 0
        self._labels: set[int] = set()

    def see(self, batch: Any) -> None:
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point() or len(labels) < 2:
            return
        self._same += int((labels[1:] == labels[:-1]).sum())
        self._pairs += len(labels) - 1
        if len(self._labels) < 2:
            self._labels.update(labels.unique().tolist())

    def caveat(self) -> str | None:
        if len(self._labels) < 2 or self._same <= SORTED * self._pairs:
            return None
        return "the data are sorted by label: blocks of rows see one class at a time; shuffle them, or take exact=True"
