"""One process's share of a stream of chunks, and reading only that where the data can be read at any place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

Span = tuple[int, int]  # from one input up to another


@dataclass(frozen=True)
class Share:
    """Every `of`-th chunk, from number `rank` on: nothing is read twice, nothing is padded."""

    rank: int = 0
    of: int = 1

    def has(self, number: int) -> bool:
        return number % self.of == self.rank


ALL = Share()


@dataclass(frozen=True)
class Places:
    """Data whose inputs can be read in any order: how many, in batches of how many, and how."""

    total: int
    size: int
    read: Callable[[Iterable[Span]], Iterable[Any]]  # one batch for each span of inputs

    @classmethod
    def of(cls, data: Any, total: int | None) -> Places | None:
        """None where inputs can only be had one after the other."""
        if total is None:
            return None
        if isinstance(data, DataLoader):
            return (
                cls(total, int(data.batch_size or 0), lambda spans: _loaded(data, spans)) if _by_index(data) else None
            )
        read, size = getattr(data, "read", None), getattr(data, "size", None)
        if callable(read) and isinstance(size, int) and isinstance(getattr(data, "total", None), int):
            return cls(total, size, lambda spans: (read(start, stop) for start, stop in spans))
        return None

    def spans(self, *, block: int | None, skip: int, max_rows: int | None, largest: int | None) -> Iterator[Span]:
        """The chunks that going through the batches would give; see `recut`."""
        end = self.total if max_rows is None else min(self.total, max_rows)
        if skip >= end:
            return
        if block is None:
            yield from pairwise(chain([skip], range((skip // self.size + 1) * self.size, end, self.size), [end]))
            return
        first = skip // self.size * self.size
        loaded = min(self.size, self.total - first)
        size = max(block, min(loaded, largest or loaded) // block * block)
        while end - skip >= size + block:
            yield skip, skip + size
            skip += size
        yield skip, end


def _by_index(loader: DataLoader[Any]) -> bool:
    """In order, in batches of one size, and put together without regard to the others of a batch."""
    return (
        loader.batch_size is not None
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.sampler) is SequentialSampler
        and loader.collate_fn is default_collate
    )


def _loaded(loader: DataLoader[Any], spans: Iterable[Span]) -> Iterable[Any]:
    """As the user's own loader would: with its workers, its pinned memory."""
    return DataLoader(
        loader.dataset,
        batch_sampler=(list(range(*span)) for span in spans),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        generator=loader.generator,
    )
