"""Saving statistics on the way, and going on from them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .collect import Pair, Totals
from .partial import Partial

EVERY = 60.0  # seconds between two saves


class Checkpoint:
    """The file of a comparison that can be interrupted; without a path it does nothing."""

    def __init__(self, path: str | os.PathLike[str] | None, pairs: Sequence[Pair], *, on_the_way: bool = True) -> None:
        if path is not None and len(pairs) != 1:
            raise ValueError("resume= is for one pair of models; compare the pairs one by one")
        self.path = None if path is None else Path(path)
        self._pair = pairs[0]
        self._on_the_way = on_the_way  # not where one process knows but a part
        self._last = time.monotonic()

    def restore(
        self, totals: dict[Pair, Totals], partials: Callable[[], dict[Pair, Partial]], *, most: int | None
    ) -> int:
        """Fill the totals from the file, if it is there and of this very comparison; how many inputs they hold."""
        if self.path is None or not self.path.exists():
            return 0
        saved, fresh = Partial.load(self.path), partials()[self._pair]
        difference = fresh.differs_from(saved, in_data=True)
        if difference:
            raise ValueError(f"{self.path} is of another comparison: {difference}; name another file, or remove it")
        if most is not None and saved.inputs > most:
            raise ValueError(f"{self.path} holds {saved.inputs} inputs already, more than max_rows={most}")
        totals[self._pair] = Totals(dict(saved.statistics), saved.inputs, saved.rows)
        return saved.inputs

    def save(self, partials: Callable[[], dict[Pair, Partial]], *, now: bool = False) -> None:
        if self.path is None or not (now or (self._on_the_way and time.monotonic() - self._last >= EVERY)):
            return
        partials()[self._pair].save(self.path)
        self._last = time.monotonic()
