"""The inputs of a comparison, as chunks that every network reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..capture import ALL, ONE_ROW, Batches, Chunk, Rule, Share, count_inputs, cut, recut, unwrap
from ..checks import listed, whole_number
from ..data import DataPart, open_data
from ..models import NamedModel
from ..results import Side
from .network import Network, SavedActivations, Source
from .plan import size_text

SAVED_CHUNK = 1024  # rows of saved activations that are read at a time
SAVED_BYTES = 2**28  # bytes of them at one site that may be read at a time even with a smaller memory budget
CACHE = 8 * 2**20  # bytes of one activation that a CPU computes at a time
_INSTEAD = f"Choose sites of one resolution, or a rule with one row per input: {ONE_ROW}"


@dataclass
class Stream:
    """Batches, the first of which has been read; saved activations need none, and have `batches` None."""

    first: Any
    rest: Iterator[Any] | None
    total: int | None  # inputs, if known before they are read
    batches: Batches | None = None
    max_rows: int | None = None
    first_row: int = 0  # the index of the first input in the whole data, if these are a part

    def __post_init__(self) -> None:
        if self.max_rows is not None:
            whole_number(self.max_rows, "max_rows", least=1)

    @classmethod
    def of(cls, data: Any, sources: Sequence[Any], max_rows: int | None = None) -> Stream:
        """A stream of the data; without data, of the inputs of saved activations, equally many on all sides."""
        if not (data is None or (isinstance(data, DataPart) and data.data is None)):
            return cls.reading(data, max_rows)
        if any(isinstance(source, Network) for source in sources):
            raise TypeError("comparing models needs data: compare(model_a, model_b, data); --data on the command line")
        counts = {source.name: source.count for source in sources}
        if len(set(counts.values())) > 1:
            raise ValueError(f"need paired rows, got {listed(f'{n} in {name}' for name, n in counts.items())}")
        if not (total := next(iter(counts.values()))):
            raise ValueError("there is nothing to compare: no inputs were saved")
        return cls(None, None, total, max_rows=max_rows, first_row=0 if data is None else data.first_row)

    @classmethod
    def reading(cls, data: Any, max_rows: int | None = None) -> Stream:
        data, first_row = (data.data, data.first_row) if isinstance(data, DataPart) else (data, 0)
        batches = Batches(open_data(data) if isinstance(data, str) else data)
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            raise ValueError("the data yielded no inputs")
        return cls(first, rest, batches.total, batches, max_rows, first_row)

    @property
    def expected(self) -> int | None:
        """The number of inputs that will be read, if known."""
        return None if self.total is None else min(self.total, self.max_rows or self.total)

    def in_batches_of(self, inputs: int) -> Stream:
        """The same inputs, so many in each batch but the last."""
        chunks = recut(itertools.chain([self.first], self.rest or ()), block=inputs, largest=inputs)
        batches = (
            cut(chunk.batch, start, min(start + inputs, chunk.count))
            for chunk in chunks
            for start in range(0, chunk.count, inputs)
        )
        return replace(self, first=next(batches), rest=batches, batches=None)

    def chunks(
        self,
        *,
        block: int | None,
        skip: int = 0,
        largest: int | None = None,
        share: Share = ALL,
        skipped: Callable[[Chunk], None] | None = None,
        saved_chunk: int = SAVED_CHUNK,
    ) -> Iterator[Chunk]:
        """Chunks of whole blocks, from input `skip` on; chunks of other shares come without their inputs.

        `skipped` is called with the inputs before `skip`, in chunks of any size.
        """
        if self.rest is None:
            yield from self._saved_chunks(block, skip, skipped, saved_chunk)
            return
        batches: Any = itertools.chain([self.first], self.rest)
        if skip and skipped is not None:
            batches = _shown(batches, skip, skipped)
        if share.of > 1 and self.batches is not None and self.batches.read is not None:
            if skip and skipped is not None:
                sizes = itertools.accumulate(map(count_inputs, batches))
                next((size for size in sizes if size >= skip), None)  # reads the skipped batches
            batches, self.rest = self.batches, iter(())  # so a loader's workers may end
        yield from recut(batches, block=block, skip=skip, max_rows=self.max_rows, largest=largest, share=share)

    def _saved_chunks(
        self, block: int | None, skip: int, skipped: Callable[[Chunk], None] | None, most: int
    ) -> Iterator[Chunk]:
        assert self.total is not None
        if skip > self.total:
            raise _too_few(self.total, skip)
        if skipped is not None:
            for start in range(0, skip, most):
                skipped(Chunk(None, start, min(most, skip - start)))
        end = min(self.total, self.max_rows or self.total)
        size = most if block is None else max(block, most // block * block)
        while skip < end:
            # A remainder smaller than a block joins the last chunk.
            count = end - skip if end - skip < size + (block or 0) else size
            yield Chunk(None, skip, count)
            skip += count


def _shown(batches: Iterator[Any], skip: int, skipped: Callable[[Chunk], None]) -> Iterator[Any]:
    """Pass batches through, and call `skipped` with the first `skip` inputs."""
    seen = 0
    for batch in batches:
        if seen < skip:
            count = count_inputs(batch)
            skipped(Chunk(cut(batch, 0, min(count, skip - seen)), seen, min(count, skip - seen)))
            seen += count
        yield batch
    if seen < skip:
        raise _too_few(seen, skip)


def _too_few(inputs: int, skip: int) -> ValueError:
    return ValueError(
        f"the data end after {inputs} inputs, but the statistics to be resumed hold {skip}, so they are of other data; "
        "name another file, or remove it"
    )


def chunk_on_cpu(sources: Sequence[Source], sides: Sequence[Side]) -> int | None:
    """Inputs per chunk such that the widest activation fits a CPU's cache; None on a GPU: the loader's batches.

    Forward passes are faster in such chunks, and rows are still in the cache when Gram matrices are made.
    """
    if not all(source.on_cpu() for source in sources):
        return None
    return max(1, CACHE // (4 * max(width for side in sides for width in side.widths)))


def saved_chunk(sources: Sequence[Source], memory: int, least: int) -> int:
    """Inputs of saved activations to read at a time, at least `least`: as many of the widest site as fit the memory.

    A small file may hold long rows, well compressed, so rows that do not fit are an error before they are read.
    """
    files = [source for source in sources if isinstance(source, SavedActivations) and source.saved.path is not None]
    rows = {(source.name, site): size for source in files for site, size in source.row_bytes().items()}
    if not rows:
        return SAVED_CHUNK
    (name, site), widest = max(rows.items(), key=lambda row: row[1])
    least, memory = min(least, min(source.saved.n for source in files)), max(memory, SAVED_BYTES)
    if least * widest > memory:
        raise MemoryError(
            f"{name}: {least} inputs are read at a time, which take {size_text(least * widest)} at site {site!r}, "
            f"more than the budget of {size_text(memory)}. Raise memory=, leave out the site, or save it pooled"
        )
    return max(least, min(SAVED_CHUNK, memory // max(1, widest)))


def rows_per_input(sources: Sequence[Source]) -> int:
    """The number of rows per input, which must be the same at every site for rows to be paired."""
    sites: dict[int, list[str]] = {}
    for source in sources:
        for site, count in source.per_input().items():
            sites.setdefault(count, []).append(f"{source.name}: {site}")
    if len(sites) > 1:
        text = "; ".join(f"{count} per input at {listed(names, 3)}" for count, names in sorted(sites.items()))
        least = math.isqrt(min(sites))
        squares = least > 1 and all(math.isqrt(count) ** 2 == count for count in sites)
        pool = f"rows='grid({least})' averages square maps to {least} × {least}. " if squares else ""
        raise ValueError(f"need paired rows, but the sites give different numbers of them: {text}. {pool}{_INSTEAD}")
    return next(iter(sites))


def check_positions(sources: Sequence[Source]) -> None:
    """Raise unless every input of the last chunk gave as many rows, of the same tokens, at every site."""
    every = [(f"{source.name}: {site}", counts) for source in sources for site, counts in source.counts().items()]
    for site, counts in every[1:]:
        first, expected = every[0]
        if odd := (counts != expected).nonzero().flatten().tolist():
            k = odd[0]
            raise ValueError(
                f"need paired rows, but input {k} of a chunk has {expected[k]} tokens at {first} and {counts[k]} at "
                f"{site}. {_INSTEAD}"
            )
    texts = [(s.name, s.tokens.cpu()) for s in sources if isinstance(s, Network) and s.tokens is not None and every]
    for name, tokens in texts[1:]:
        if not torch.equal(texts[0][1], tokens):
            raise ValueError(
                f"rows='positions' pairs token with token, but {texts[0][0]} and {name} cut the same text into "
                f"different ones, though as many of them. {_INSTEAD}"
            )


def look_at(
    model: nn.Module | NamedModel, data: Any, *, sites: Any = "leaves", rows: Rule = "flatten"
) -> list[tuple[str, tuple[int, ...], int, str]]:
    """The sites of a model: label, shape, width and kind of each, in execution order.

    `data` may be the shape of one input.
    """
    if isinstance(data, tuple) and all(isinstance(part, int) for part in data):
        data = torch.rand(2, *data, generator=torch.Generator().manual_seed(0))
    network = Network.of(model, sites=sites, rows=rows)
    with network.opened():
        side = network.look(Stream.of(data, [network]).first)
    modules = dict(unwrap(network.model).named_modules())
    kinds = [type(modules.get(label.partition("@")[0], network.model)).__name__ for label in side.sites]
    return list(zip(side.sites, side.shapes, side.widths, kinds, strict=True))
