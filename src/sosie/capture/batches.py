"""Data as a stream of batches, cut anew so that the loader's batch size does not matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, default_collate

from ..checks import whole_number
from .structure import BadBatch, count_inputs, cut, is_text, join, with_tensors

# One process's share of a stream of chunks, and reading only that where the data can be read at any place

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
        """None where inputs can only be read in order."""
        if total is None:
            return None
        if isinstance(data, DataLoader):
            # In order, in batches of one size, and put together without regard to the others of a batch.
            in_order = type(data.sampler) is SequentialSampler and not isinstance(data.dataset, IterableDataset)
            if data.batch_size is None or not in_order or data.collate_fn is not default_collate:
                return None
            return cls(total, data.batch_size, lambda spans: _loaded(data, spans))
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


BATCH = 128  # inputs per batch where the data come in no batches of their own


class NoData(ValueError):
    """The data held no inputs."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive inputs of the stream, in the structure of the loader's batches."""

    batch: Any  # None: of saved activations, or of another process's share
    start: int  # index of the first input in the whole data
    count: int


class Batches:
    """Any data as batches: an iterable of them, a whole tensor, array, dict or list of texts, or a Dataset of samples.

    `total` is the number of inputs where that is known without reading the data, else None.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._used = False
        self.total = _total(data)
        if isinstance(data, (Tensor, np.ndarray, Mapping)) or is_text(data):
            whole, count = with_tensors(data), count_inputs(data)
            self._data = [cut(whole, start, min(start + BATCH, count)) for start in range(0, count, BATCH)]
        elif isinstance(data, Dataset) or _is_map_style(data):
            self._data = DataLoader(data, batch_size=BATCH, shuffle=False)
        elif isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
            raise TypeError(f"data must be iterable and yield batches, got {type(data).__name__}")
        elif isinstance(data, tuple) and _looks_like_a_pair(data):
            raise BadBatch("a tuple of different tensors may be one batch or two: give [(x, y)] or TensorDataset(x, y)")
        self.places = Places.of(self._data, self.total)

    def __iter__(self) -> Iterator[Any]:
        for batch, _ in self._counted():
            yield batch

    def _counted(self) -> Iterator[tuple[Any, int]]:
        stream = iter(self._data)
        if stream is self._data and self._used:
            raise NoData("the data are a one-shot iterator that was read before: give a list or a DataLoader")
        self._used = True
        empty = True
        for raw in stream:
            batch = with_tensors(raw)
            count = count_inputs(batch)
            if count:
                empty = False
                yield batch, count
        if empty:
            raise NoData("the data yielded no inputs")


def recut(
    batches: Any,
    *,
    block: int | None,
    skip: int = 0,
    max_rows: int | None = None,
    largest: int | None = None,
    share: Share = ALL,
) -> Iterator[Chunk]:
    """The same inputs in chunks of a multiple of `block`: as large as the loader's first batch, or `largest`.

    The last chunk has what is left: fewer than `block` inputs never stand alone unless there are no more.
    With `block=None` the loader's batches pass as they are. The first `skip` inputs are left out, and those
    from index `max_rows` on (counted from the start of the data, the skipped ones included). Chunks that are not
    of this process's `share` come without their inputs, which are not even read where that can be helped.
    """
    if block is not None:
        whole_number(block, "block", least=1)
    if max_rows is not None:
        whole_number(max_rows, "max_rows", least=1)
    source = batches if isinstance(batches, Batches) else Batches(batches)
    if share.of > 1 and source.places is not None:
        yield from _read_there(source.places, share, block=block, skip=skip, max_rows=max_rows, largest=largest)
        return
    whole = _whole_chunks(source, block, skip, max_rows, largest)
    for number, (take, start, count) in enumerate(whole):
        yield Chunk(take() if share.has(number) else None, start, count)


def _read_there(places: Places, share: Share, **how: Any) -> Iterator[Chunk]:
    mine = (span for number, span in enumerate(places.spans(**how)) if share.has(number))
    batches = iter(places.read(mine))
    for number, (start, stop) in enumerate(places.spans(**how)):
        batch = None
        if share.has(number):
            batch = with_tensors(next(batches))
            if count_inputs(batch) != stop - start:
                raise BadBatch(f"inputs {start} to {stop - 1} were asked for, and {count_inputs(batch)} came")
        yield Chunk(batch, start, stop - start)


def _whole_chunks(
    source: Batches, block: int | None, skip: int, max_rows: int | None, largest: int | None
) -> Iterator[tuple[Callable[[], Any], int, int]]:
    """Each chunk as a way to put its inputs together, where it starts and how many inputs it has."""
    if block is None:
        for _, chunk in _bounded(source, skip, max_rows):
            yield partial(getattr, chunk, "batch"), chunk.start, chunk.count
        return
    waiting: deque[Chunk] = deque()  # inputs read but not yet handed on
    held, size = 0, None
    for loaded, chunk in _bounded(source, skip, max_rows):
        if size is None:
            size = max(block, min(loaded, largest or loaded) // block * block)
        waiting.append(chunk)
        held += chunk.count
        while held >= size + block:
            yield _take(waiting, size)
            held -= size
    if held:
        yield _take(waiting, held)


def _bounded(source: Batches, skip: int, max_rows: int | None) -> Iterator[tuple[int, Chunk]]:
    """The size of each batch as loaded, and what of it lies between skip and max_rows."""
    seen = 0
    for batch, count in source._counted():
        first = min(max(skip - seen, 0), count)
        last = count if max_rows is None else min(count, max_rows - seen)
        if first < last:
            part = batch if (first, last) == (0, count) else cut(batch, first, last)
            yield count, Chunk(part, seen + first, last - first)
        seen += count
        if max_rows is not None and seen >= max_rows:
            return


def _take(waiting: deque[Chunk], size: int) -> tuple[Callable[[], Any], int, int]:
    """The next inputs; they are put together, which copies, only if they are wanted."""
    start, taken, missing = waiting[0].start, [], size
    while missing:
        part = waiting.popleft()
        if part.count > missing:
            waiting.appendleft(Chunk(cut(part.batch, missing, part.count), part.start + missing, part.count - missing))
            part = Chunk(cut(part.batch, 0, missing), part.start, missing)
        taken.append(part.batch)
        missing -= part.count
    return partial(join, taken), start, size


def _looks_like_a_pair(data: tuple[Any, ...]) -> bool:
    arrays = [part for part in data if isinstance(part, (Tensor, np.ndarray))]
    return len(arrays) == len(data) > 1 and len({tuple(part.shape[1:]) for part in arrays}) > 1


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable)


def _total(data: Any) -> int | None:
    try:
        if isinstance(data, DataLoader):
            if data.batch_size is None:
                return None  # batches are made by the data set or a sampler of the user's own
            inputs = len(data.dataset if isinstance(data.dataset, IterableDataset) else data.sampler)  # type: ignore[arg-type]
            return inputs // data.batch_size * data.batch_size if data.drop_last else inputs
        if isinstance(data, (Tensor, np.ndarray, Mapping)) or is_text(data):
            return count_inputs(data)
        if isinstance(data, Dataset) or _is_map_style(data):
            return len(data)
        if isinstance(data, (list, tuple)):
            return sum(count_inputs(with_tensors(batch)) for batch in data)
        if isinstance(getattr(data, "total", None), int):
            return int(data.total)  # batches that know how many inputs they hold
    except (TypeError, NotImplementedError):
        pass  # a sampler or data set without a length
    return None
