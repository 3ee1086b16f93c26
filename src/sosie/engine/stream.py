"""The inputs of a comparison, as chunks that every network reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture import ALL, Batches, Chunk, Rule, Share, count_inputs, cut, recut, unwrap
from ..checks import whole_number
from ..data import DataPart, open_data
from ..models import NamedModel
from ..results import Side
from .network import Network, SavedActivations, Source
from .plan import size_text

SAVED_CHUNK = 1024  # rows of saved activations that are read at a time
SAVED_BYTES = 2**28  # of them at one site, which are read at a time even if statistics are given less memory
CACHE = 8 * 2**20  # bytes of one activation that a CPU is given at a time
_INSTEAD = (
    "Choose sites of one resolution, or a rule with one row per input: rows='mean', for tokens also 'cls' or 'last'"
)


@dataclass
class Stream:
    """Batches whose first one has been looked at; what was saved needs none, and has `batches` None."""

    first: Any
    rest: Iterator[Any] | None
    total: int | None  # inputs, where that is known before they are read
    batches: Batches | None = None
    max_rows: int | None = None
    first_row: int = 0  # the index of the first input in the whole data, where these are a part

    def __post_init__(self) -> None:
        if self.max_rows is not None:
            whole_number(self.max_rows, "max_rows", least=1)

    @classmethod
    def of(cls, data: Any, sources: Sequence[Any], max_rows: int | None = None) -> Stream:
        """The data, or without any the inputs of what was saved, which must be as many on all sides."""
        if not (data is None or (isinstance(data, DataPart) and data.data is None)):
            return cls.reading(data, max_rows)
        if any(isinstance(source, Network) for source in sources):
            raise TypeError("comparing models needs data, the third argument: (model_a, model_b, data)")
        counts = {source.name: source.count for source in sources}
        if len(set(counts.values())) > 1:
            raise ValueError(f"need paired rows, got {', '.join(f'{n} in {name}' for name, n in counts.items())}")
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
        """How many inputs will be read, where that is known."""
        return None if self.total is None else min(self.total, self.max_rows or self.total)

    def chunks(
        self,
        *,
        block: int | None,
        skip: int = 0,
        max_rows: int | None = None,
        largest: int | None = None,
        share: Share = ALL,
        skipped: Callable[[Chunk], None] | None = None,
        saved_chunk: int = SAVED_CHUNK,
    ) -> Iterator[Chunk]:
        """Chunks of whole blocks, from input `skip` on; those of other shares come without their inputs.

        `skipped` is shown the inputs before, which may be cut otherwise.
        """
        end = max_rows or self.max_rows
        if self.rest is None:
            yield from self._saved_chunks(block, skip, end, skipped, saved_chunk)
            return
        batches: Any = itertools.chain([self.first], self.rest)
        if skip and skipped is not None:
            batches = _shown(batches, skip, skipped)
        if share.of > 1 and self.batches is not None and self.batches.read is not None:
            if skip and skipped is not None:
                sizes = itertools.accumulate(map(count_inputs, batches))
                next((size for size in sizes if size >= skip), None)  # those that are shown are read here
            batches, self.rest = self.batches, iter(())  # a loader's workers need not go on
        yield from recut(batches, block=block, skip=skip, max_rows=end, largest=largest, share=share)

    def _saved_chunks(
        self, block: int | None, skip: int, end: int | None, skipped: Callable[[Chunk], None] | None, most: int
    ) -> Iterator[Chunk]:
        assert self.total is not None
        if skip > self.total:
            raise _too_few(self.total, skip)
        if skipped is not None:
            for start in range(0, skip, most):
                skipped(Chunk(None, start, min(most, skip - start)))
        end = min(self.total, end or self.total)
        size = most if block is None else max(block, most // block * block)
        while skip < end:
            # What is left joins the last chunk if it would not fill a block.
            count = end - skip if end - skip < size + (block or 0) else size
            yield Chunk(None, skip, count)
            skip += count


def _shown(batches: Iterator[Any], skip: int, skipped: Callable[[Chunk], None]) -> Iterator[Any]:
    """The same batches, of which the first inputs are shown on the way."""
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
        f"the data end after {inputs} inputs, but the statistics to be resumed hold {skip}: these are other data; name "
        "another file, or remove it"
    )


def chunk_on_cpu(sources: Sequence[Source], sides: Sequence[Side]) -> int | None:
    """Inputs per chunk such that the widest activation stays in a CPU's cache; a GPU takes the loader's batches.

    Forward passes are faster for it, and Gram matrices find their rows still in the cache.
    """
    if not all(source.on_cpu() for source in sources):
        return None
    return max(1, CACHE // (4 * max(width for side in sides for width in side.widths)))


def saved_chunk(sources: Sequence[Source], memory: int, least: int) -> int:
    """Inputs of saved activations to read at a time, at least so many: as many of the widest site as fit the memory.

    A small file may hold long rows that are compressed well, so what does not fit is refused before it is read.
    """
    files = [source for source in sources if isinstance(source, SavedActivations) and source.saved.path is not None]
    rows = {(source.name, site): size for source in files for site, size in source.row_bytes().items()}
    if not rows:
        return SAVED_CHUNK
    (name, site), widest = max(rows.items(), key=lambda row: row[1])
    least, memory = min(least, min(source.saved.n for source in files)), max(memory, SAVED_BYTES)
    if least * widest > memory:
        raise MemoryError(
            f"{name}: {least} inputs are worked on at a time, which take {size_text(least * widest)} at site {site!r}, "
            f"more than the budget of {size_text(memory)}. Raise memory=, leave the site out, or save it pooled"
        )
    return max(least, min(SAVED_CHUNK, memory // widest))


def rows_per_input(sources: Sequence[Source]) -> int:
    """How many rows an input gives; the same at every site, or rows could not be paired."""
    sites: dict[int, list[str]] = {}
    for source in sources:
        for site, count in source.per_input().items():
            sites.setdefault(count, []).append(f"{source.name}: {site}")
    if len(sites) > 1:
        text = "; ".join(
            f"{count} per input at {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
            for count, names in sorted(sites.items())
        )
        raise ValueError(f"need paired rows, but the sites give different numbers of them: {text}. {_INSTEAD}")
    return next(iter(sites))


def check_positions(sources: Sequence[Source]) -> None:
    """Where an input gives several rows, raise unless those of the last chunk gave the same tokens at every site."""
    each = [(f"{source.name}: {site}", counts) for source in sources for site, counts in source.counts().items()]
    for site, counts in each[1:]:
        first, expected = each[0]
        odd = (counts != expected).nonzero().flatten().tolist()
        if odd:
            k = odd[0]
            raise ValueError(
                f"need paired rows, but input {k} of a chunk has {expected[k]} tokens at {first} and {counts[k]} at "
                f"{site}. {_INSTEAD}"
            )
    made = [(s.name, s.tokens.cpu()) for s in sources if isinstance(s, Network) and s.tokens is not None and each]
    for name, tokens in made[1:]:
        if not torch.equal(made[0][1], tokens):
            raise ValueError(
                f"rows='positions' pairs token with token, but {made[0][0]} and {name} cut the same text into "
                f"different ones, though as many of them. {_INSTEAD}"
            )


def look_at(
    model: nn.Module | NamedModel, data: Any, *, sites: Any = "leaves", rows: Rule = "flatten"
) -> list[tuple[str, tuple[int, ...], int, str]]:
    """What of a model can be compared: label, shape, width and kind of each site, in execution order.

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
