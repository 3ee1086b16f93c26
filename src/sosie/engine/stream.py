"""The inputs of a comparison, as chunks that every source reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture import ALL, Batches, Chunk, NoData, Rule, Share, count_inputs, cut, recut, unwrap
from ..data import open_data
from ..models import NamedModel
from ..results import Side
from .network import Network, SavedActivations, Source

SAVED_CHUNK = 1024  # rows of saved activations that are read at a time
_INSTEAD = (
    "Choose sites of one resolution, or a rule with one row an input: rows='mean', for tokens also 'cls' or 'last'"
)
CACHE = 8 * 2**20  # bytes of one activation that a CPU is given at a time


@dataclass
class Stream:
    """Batches whose first one has been looked at; saved activations alone need none."""

    first: Any
    rest: Iterator[Any] | None
    total: int | None
    batches: Batches | None = None

    @classmethod
    def of(cls, data: Any, sources: Sequence[Source]) -> Stream:
        saved = [source for source in sources if isinstance(source, SavedActivations)]
        return cls(None, None, _paired(sources, saved)) if data is None else cls.reading(data)

    @classmethod
    def reading(cls, data: Any) -> Stream:
        if isinstance(data, str):
            data = open_data(data)
        batches = Batches(data)
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            raise NoData("the data yielded no inputs")
        return cls(first, rest, batches.total, batches)

    def chunks(
        self,
        *,
        block: int | None,
        skip: int = 0,
        max_rows: int | None,
        largest: int | None = None,
        share: Share = ALL,
        skipped: Callable[[Chunk], None] | None = None,
    ) -> Iterator[Chunk]:
        """Chunks of whole blocks, from input `skip` on; those of other shares without their inputs.

        `skipped` is shown the inputs before, which may be cut otherwise.
        """
        if self.rest is not None:
            batches: Any = itertools.chain([self.first], self.rest)
            if skip and skipped is not None:
                batches = _shown(batches, skip, skipped)
            if share.of > 1 and self.batches is not None and self.batches.places is not None:
                if skip and skipped is not None:
                    sizes = itertools.accumulate(map(count_inputs, batches))
                    next((size for size in sizes if size >= skip), None)  # those that are shown are read here
                batches, self.rest = self.batches, iter(())  # a loader's workers need not go on
            yield from recut(batches, block=block, skip=skip, max_rows=max_rows, largest=largest, share=share)
            return
        assert self.total is not None
        if skip > self.total:
            raise _too_few(self.total, skip)
        for start in range(0, skip if skipped is not None else 0, SAVED_CHUNK):
            assert skipped is not None
            skipped(Chunk(None, start, min(SAVED_CHUNK, skip - start)))
        end = min(self.total, max_rows or self.total)
        size = SAVED_CHUNK if block is None else max(block, SAVED_CHUNK // block * block)
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
        f"the data end after {inputs} inputs, but the statistics that are to be resumed hold {skip}: these are other "
        "data; name another file, or remove it"
    )


def _paired(sources: Sequence[Source], saved: Sequence[SavedActivations]) -> int:
    if len(saved) < len(sources):
        raise TypeError("comparing models needs data: compare(model_a, model_b, data)")
    counts = {source.name: source.saved.n for source in saved}
    if len(set(counts.values())) > 1:
        raise ValueError(f"need paired rows, got {', '.join(f'{n} in {name}' for name, n in counts.items())}")
    return next(iter(counts.values()))


def chunk_on_cpu(sources: Sequence[Source], sides: Sequence[Side]) -> int | None:
    """Inputs a chunk such that the widest activation stays in a CPU's cache; a GPU takes the loader's batches.

    Forward passes are faster for it, and Gram matrices find their rows still in the cache.
    """
    if not all(source.on_cpu() for source in sources):
        return None
    return max(1, CACHE // (4 * max(width for side in sides for width in side.widths)))


def rows_per_input(sources: Sequence[Source]) -> int:
    """How many rows an input gives; the same at every site, or rows could not be paired."""
    found: dict[int, list[str]] = {}
    for source in sources:
        for site, count in source.per_input().items():
            found.setdefault(count, []).append(f"{source.name}: {site}")
    if len(found) > 1:
        text = "; ".join(
            f"{count} an input at {', '.join(sites[:3])}{' …' if len(sites) > 3 else ''}"
            for count, sites in sorted(found.items())
        )
        raise ValueError(f"need paired rows, but the sites give different numbers of them: {text}. {_INSTEAD}")
    return next(iter(found))


def check_positions(sources: Sequence[Source]) -> None:
    """Under "positions", raise unless every input of the last chunk gave the same tokens at every site."""
    found = [(f"{source.name}: {site}", counts) for source in sources for site, counts in source.counts().items()]
    for site, counts in found[1:]:
        first, expected = found[0]
        odd = (counts != expected).nonzero().flatten().tolist()
        if odd:
            k = odd[0]
            raise ValueError(
                f"need paired rows, but input {k} of a chunk has {expected[k]} tokens at {first} and {counts[k]} at "
                f"{site}. {_INSTEAD}"
            )
    tokenised = [source for source in sources if isinstance(source, Network) and source.tokens is not None]
    for source in tokenised[1:] if found else ():
        one, other = tokenised[0].tokens, source.tokens
        assert one is not None
        assert other is not None
        if not torch.equal(one.cpu(), other.cpu()):
            raise ValueError(
                f"rows='positions' pairs token with token, but {tokenised[0].name} and {source.name} cut the same text "
                f"into different ones, though as many of them. {_INSTEAD}"
            )


# What of a model can be compared


def look_at(
    model: nn.Module | NamedModel, data: Any, *, sites: Any = "leaves", rows: Rule = "flatten"
) -> list[tuple[str, tuple[int, ...], int, str]]:
    """Label, shape, width and kind of each site, in execution order; `data` may be the shape of one input."""
    named = model if isinstance(model, NamedModel) else NamedModel(model, type(model).__name__, None, "")
    if isinstance(data, tuple) and all(isinstance(part, int) for part in data):
        data = torch.rand(2, *data, generator=torch.Generator().manual_seed(0))
    source = Network(named.model, named.name, sites, rows, named.prepare)
    with source.opened():
        side = source.look(Stream.of(data, [source]).first)
    modules = dict(unwrap(named.model).named_modules())
    kinds = [type(modules.get(label.partition("@")[0], named.model)).__name__ for label in side.sites]
    return list(zip(side.sites, side.shapes, side.widths, kinds, strict=True))
