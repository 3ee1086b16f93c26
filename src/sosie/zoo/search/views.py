"""What searches keep between them, read again when the zoo has changed: where rows are, what is known of models."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..store import EXACT, Mapped, Store
from ..store.filters import several
from .indexed import Indexes

MOST_KEPT = 16  # views, of which one is 24 bytes a model
MOST_FACTS = 10_000  # models of which facts are kept
FACTS = ("architecture", "parameters", "task", "tags", "parent")
T = TypeVar("T")


class Views:
    """Rows by kind and filters, facts by model; safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._facts: dict[tuple[str, int], dict[str, Any]] = {}
        self._changes = -1
        self.indexes = Indexes()

    def of(self, kind: str, **filters: Any) -> Mapped:
        """As `Store.mapped` gives them."""
        filters = {name: several(value, name) for name, value in filters.items() if value is not None}
        key = kind, *filters.items()
        return self._once(key, lambda: self.store.mapped(kind, **filters))

    def exact(self) -> Mapped | None:
        """The whole vectors, if models have some."""
        return self.of(EXACT) if EXACT in self.kinds() else None

    def kinds(self) -> list[str]:
        return self._once("kinds", self.store.kinds)

    def described(self, ids: Sequence[int], kind: str) -> dict[int, dict[str, Any]]:
        """As `Store.described`; not to be changed."""
        if len(ids) > MOST_FACTS:
            return self.store.described(ids, kind)
        changes = self._looked()
        with self._lock:
            known = {model: self._facts[kind, model] for model in ids if (kind, model) in self._facts}
        if len(known) == len(ids):
            return known
        found = self.store.described([model for model in ids if model not in known], kind)
        with self._lock:
            if changes == self._changes:
                if len(self._facts) + len(found) > MOST_FACTS:
                    self._facts.clear()
                self._facts.update({(kind, model): fact for model, fact in found.items()})
        return known | found

    def _once(self, key: Hashable, read: Callable[[], T]) -> T:
        changes = self._looked()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                kept: T = self._kept[key]
                return kept
        found = read()
        with self._lock:
            if changes == self._changes:
                self._kept[key] = found
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return found

    def _looked(self) -> int:
        """How often the zoo has changed; what is of an earlier time is forgotten."""
        changes = self.store.database.changes()
        with self._lock:
            if changes != self._changes:
                self._kept.clear()
                self._facts.clear()
                self._changes = changes
        return changes


def about(fact: dict[str, Any]) -> dict[str, Any]:
    """What every answer says of a model beside its name."""
    return {name: fact[name] for name in FACTS} | {"tags": list(fact["tags"])}


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
    mapped.verify(slice(k, k + 1))
    first = int(mapped.first[k])
    return np.asarray(mapped.rows[first : first + int(mapped.count[k])], np.float64)
