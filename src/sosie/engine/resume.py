"""Saving statistics on the way, and going on from them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..capture import Chunk
from .collect import Pair, Totals
from .digest import STRETCH, InputDigests
from .partial import Partial
from .sources import SavedSource, Source

EVERY = 60.0  # seconds between two saves


class Checkpoint:
    """The file of a comparison that can be interrupted; without a path it does nothing."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        pairs: Sequence[Pair],
        sources: Sequence[Source],
        *,
        on_the_way: bool = True,
    ) -> None:
        if path is not None and len(pairs) != 1:
            raise ValueError("resume= is for one pair of models; compare the pairs one by one")
        self.path = None if path is None else Path(path)
        self._pair = pairs[0]
        self._saved_sources = [source for source in sources if isinstance(source, SavedSource)]
        self._on_the_way = on_the_way  # not where one process knows but a part
        self._last = time.monotonic()
        self.digests = InputDigests()  # of the inputs that were read
        self._before: dict[int, int] = {}  # the same, of those that the file holds
        self._skip = 0

    def restore(
        self, totals: dict[Pair, Totals], partials: Callable[[], dict[Pair, Partial]], *, most: int | None
    ) -> int:
        """Fill the totals from the file, if it is there and of this very comparison; how many inputs they hold."""
        if self.path is None or not self.path.exists():
            return 0
        saved, fresh = Partial.load(self.path), partials()[self._pair]
        difference = fresh.differs_from(saved, in_data=True)
        if difference:
            raise self._other(difference)
        if saved.seen is None:
            raise ValueError(f"{self.path} is older and does not say which inputs it holds: remove it to begin anew")
        if most is not None and saved.inputs > most:
            raise ValueError(f"{self.path} holds {saved.inputs} inputs already, more than max_rows={most}")
        totals[self._pair] = Totals(dict(saved.statistics), saved.inputs, saved.rows)
        self._before, self._skip = saved.seen, saved.inputs
        return saved.inputs

    def save(self, partials: Callable[[], dict[Pair, Partial]], *, now: bool = False) -> None:
        if self.path is None or not (now or (self._on_the_way and time.monotonic() - self._last >= EVERY)):
            return
        replace(partials()[self._pair], seen=self.digests.sums).save(self.path)
        self._last = time.monotonic()

    def digested(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The same chunks, whose inputs are remembered."""
        for chunk in chunks:
            if self.path is not None:
                self._digest(chunk)
            yield chunk

    def skipped(self, chunk: Chunk) -> None:
        """Inputs that the file holds already, as the data have them now; raise where they are others."""
        self._digest(chunk)
        end = chunk.start + chunk.count
        for k in range(chunk.start // STRETCH, end // STRETCH if end < self._skip else -(-end // STRETCH)):
            if self.digests.sums[k] != self._before.get(k):
                rows = f"{k * STRETCH} to {min((k + 1) * STRETCH, self._skip) - 1}"
                raise self._other(f"the data are not the same: among inputs {rows} there are others")

    def _digest(self, chunk: Chunk) -> None:
        stop = chunk.start + chunk.count
        saved = [source.activations(chunk.start, stop) for source in self._saved_sources]
        self.digests.add((chunk.batch, *saved), chunk.start, chunk.count)

    def _other(self, difference: str) -> ValueError:
        return ValueError(f"{self.path} is of another comparison: {difference}; name another file, or remove it")
