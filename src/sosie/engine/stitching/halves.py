"""The two networks of a stitch, each cut at a site, and the network of the one's lower and the other's upper part."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...capture import (
    Batches,
    Chunk,
    Cut,
    Masks,
    NoData,
    Site,
    answer_in,
    as_found,
    ends,
    mixing_note,
    model_arguments,
    recut,
    to_rows,
    watch,
)
from ...capture.rows import token_mask
from ...capture.structure import count_inputs, join
from ...data import open_data
from ...models import open_model, weights_of, with_name
from ...models.joint import Joint
from ...process_state import kept_random_state

CHUNK = 128  # inputs that both networks are run on at a time
TRIED = 2  # inputs that a cut is tried on: whether it leaks shows on two


@dataclass
class Half:
    """One of the two networks: cut at a site, with the normalisation of its own."""

    name: str
    model: nn.Module
    cut: Cut
    prepare: Callable[[Any], Any] | None
    inputs: Callable[[Any], Any] | None
    weights: str = ""  # where they are from, if that is known

    def call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = next(self.model.parameters(), None)
        device = None if first is None else first.device
        return model_arguments(batch, model=self.model, inputs=self.inputs, prepare=self.prepare, device=device)

    def representation(self, batch: Any) -> Tensor:
        args, kwargs = self.call(batch)
        return self.cut.representation(*args, **kwargs)

    def tokens(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The representation, and at which of its tokens (inputs, tokens) there is no padding; None: at all."""
        args, kwargs = self.call(batch)
        activation = self.cut.representation(*args, **kwargs)
        return activation, self.no_padding(activation, self.cut.site, batch, kwargs)

    def no_padding(self, activation: Tensor, site: Site, batch: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """At which tokens of an activation there is none, (inputs, tokens); None: at all. `kwargs`: from `call`."""
        # As compare reads them: what `inputs` made of the batch comes first, else the batch's own mask.
        mask = Masks.of(*((kwargs, batch) if self.inputs else (batch, kwargs))).at(site, activation)
        return None if mask is None else token_mask(mask, "positions", activation, site=site)

    def answer(self, batch: Any) -> Tensor:
        args, kwargs = self.call(batch)
        return answer_of(self.model(*args, **kwargs))

    def mixing(self, sites: Sequence[Site], batch: Any) -> str | None:
        """Whether the network mixes the inputs of a batch, in words; None: it does not."""

        def read(chunk: Chunk) -> dict[str, Tensor]:
            def receive(site: Site, activation: Tensor) -> Tensor:
                return ends(to_rows(activation, "flatten", site=site, inputs=chunk.count))

            args, kwargs = self.call(chunk.batch)
            with watch(self.model, [site.label for site in sites], sink=receive) as seen:
                seen.run(*args, **kwargs)
            return dict(seen.items())

        with as_found(self.model):
            return mixing_note(self.name, self.model, batch, read)


class Stitched(nn.Module):
    """A network whose lower part is A's and whose upper part is B's; only the joint between them is its own."""

    def __init__(self, lower: Half, joint: Joint, upper: Half) -> None:
        super().__init__()
        self.lower, self.joint, self.upper = lower, joint, upper
        self.a, self.b = lower.model, upper.model

    def forward(self, batch: Any) -> Tensor:
        """The answer to a batch as the data give it: each half prepares it in its own way."""
        activation, of_a = self.lower.tokens(batch)
        refuse_padding(self.joint, of_a)
        activation = self.joint(activation)
        if not self.upper.cut.needs_input:
            return answer_of(self.upper.cut.task(activation))
        args, kwargs = self.upper.call(batch)
        return answer_of(self.upper.cut.task(activation, *args, **kwargs))


def refuse_padding(joint: Joint, of_a: Tensor | None) -> None:
    """Of A's tokens (`Half.no_padding`), where the joint would mix them into other positions."""
    if of_a is not None and joint.reshapes:
        raise ValueError(
            f"A's tokens are padded, and padding would count where {joint.source} become {joint.target}: stitch at "
            "sites with the same tokens, or give inputs of one length"
        )


def answer_of(output: Any) -> Tensor:
    found = answer_in(output)
    if found is None:
        raise TypeError(f"the network answered with no tensor but {type(output).__name__}")
    return found


def open_half(model: Any, site: str, prepare: Any, inputs: Any, batch: Any) -> Half:
    """A network cut at one site; the cut is tried on a batch."""
    half = open_network(model, prepare, inputs)
    args, kwargs = half.call(batch)
    half.cut = Cut(half.model, site, *args, **kwargs)
    return half


def open_network(model: Any, prepare: Any, inputs: Any) -> Half:
    """A network that has yet to be cut."""
    if isinstance(model, (str, os.PathLike)):
        model = open_model(str(model))
    weights = weights_of(model)
    model, name, prepare = with_name(model, prepare)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"cannot stitch {name}: give a torch.nn.Module or a specification like 'tiny10@weights.safetensors'"
        )
    return Half(name, model, None, prepare, inputs, weights)  # type: ignore[arg-type]


def look_into(data: Any) -> tuple[Any, Iterator[Any]]:
    """The first inputs, two of them if there are as many, and all batches with these among them.

    So an iterator that can be read but once is read but once.
    """
    batches = iter(Batches(open_data(data) if isinstance(data, str) else data))
    read: list[Any] = []
    with kept_random_state():
        while sum(map(count_inputs, read)) < TRIED and (batch := next(batches, None)) is not None:
            read.append(batch)
    if not read:
        raise NoData("the data yielded no inputs")
    return join(read), itertools.chain(read, batches)


def chunks_of(data: Any, max_rows: int | None, largest: int = CHUNK) -> Iterator[Chunk]:
    source = open_data(data) if isinstance(data, str) else data
    yield from recut(Batches(source), block=None, skip=0, max_rows=max_rows, largest=largest)
