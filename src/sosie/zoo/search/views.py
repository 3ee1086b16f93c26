"""What searches keep between them: where the rows of the models are, read again when the zoo has changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np

from ..store import EXACT, Mapped, Store
from .indexed import Indexes

MOST_KEPT = 8


class Views:
    """Rows by kind and filters; safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Mapped] = OrderedDict()
        self._changes = -1
        self.indexes = Indexes()

    def of(self, kind: str, **filters: Any) -> Mapped:
        """As `Store.mapped` gives them."""
        filters = {name: value for name, value in filters.items() if value is not None}
        key = kind, *((name, value if isinstance(value, str) else tuple(value)) for name, value in filters.items())
        changes = self.store.database.changes()
        with self._lock:
            if changes != self._changes:
                self._kept.clear()
                self._changes = changes
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        found = self.store.mapped(kind, **filters)
        with self._lock:
            if changes == self._changes:
                self._kept[key] = found
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return found

    def exact(self) -> Mapped | None:
        """The whole vectors, if models have some."""
        return self.of(EXACT) if EXACT in self.store.kinds() else None


def without(mapped: Mapped, model: int | None) -> Mapped:
    """All but one model."""
    if model is None:
        return mapped
    return mapped.part(mapped.models != model)


def rows_of(mapped: Mapped, model: int) -> Any:
    """The vectors of a model, in float64; None if it has none."""
    k = int(np.searchsorted(mapped.models, model))  # numbers go up with the rows
    if k == len(mapped.models) or mapped.models[k] != model:
        return None
    first = int(mapped.first[k])
    return np.asarray(mapped.rows[first : first + int(mapped.count[k])], np.float64)
