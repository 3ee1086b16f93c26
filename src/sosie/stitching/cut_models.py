"""The two networks of a stitch, each cut at a site; the network made of both; and one pass of both over the data."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..capture import (
    Batches,
    Chunk,
    Masks,
    Site,
    Watch,
    answer_in,
    as_found,
    count_inputs,
    cut,
    model_arguments,
    recut,
    unwrap,
    watch,
)
from ..capture.rows import token_mask
from ..capture.structure import join
from ..data import open_data
from ..engine.network import Network
from ..models import open_model, weights_of, with_name
from ..process_state import kept_random_state, products
from ..progress import Progress
from .cuts import Cut
from .joint import Form, Joint, JointSums, Pair

Precision = Literal["float32", "float64"]
PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}

CHUNK = 128  # inputs that both networks are run on at a time
HELD = 256 * 2**20  # bytes of activations of both networks that are held at a time
TRIED = 2  # inputs that a cut is tried on: whether it leaks shows on two
PER_INPUT = 64  # positions from which an input's product pays for itself; smaller maps are joined into one lot of rows


@dataclass
class CutModel(Network):
    """One of the two networks, cut at a site."""

    cut: Cut = field(init=False, repr=False)  # from `cut_at`

    @classmethod
    def open(cls, model: Any, prepare: Callable[[Any], Any] | None, inputs: Callable[[Any], Any] | None) -> CutModel:
        """A network that has yet to be cut, from a module or a specification."""
        if isinstance(model, (str, os.PathLike)):
            model = open_model(str(model))
        weights = weights_of(model)
        model, name, prepare = with_name(model, prepare)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"cannot stitch {name}: give a torch.nn.Module or a specification like 'tiny10@weights.safetensors'"
            )
        return cls(model, name, prepare=prepare, inputs=inputs, weights=weights)

    def cut_at(self, site: str, batch: Any) -> CutModel:
        """Cut it at a site; the cut is tried on a batch."""
        args, kwargs = self.call(batch)
        self.cut = Cut(self.model, site, *args, **kwargs)
        return self

    def call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the model is called with for a batch, on its device."""
        first = next(self.model.parameters(), None)
        device = None if first is None else first.device
        return model_arguments(batch, model=self.model, inputs=self.inputs, prepare=self.prepare, device=device)

    def answer(self, batch: Any) -> Tensor:
        args, kwargs = self.call(batch)
        return answer_of(self.model(*args, **kwargs))

    def representation(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The activation at the cut, and which of its tokens (inputs, tokens) are no padding; None: all of them."""
        args, kwargs = self.call(batch)
        activation = self.cut.representation(*args, **kwargs)
        return activation, self._no_padding(activation, self.cut.site, batch, kwargs)

    def run(self, batch: Any, seen: Watch, sites: Sequence[Site]) -> tuple[Any, list[Tensor], list[Tensor | None]]:
        """The output for a batch, the activation at every site under watch, and where each has no padding."""
        args, kwargs = self.call(batch)
        output = unwrap(self.model)(*args, **kwargs)
        activations = [seen[site.label] for site in sites]
        masks = [self._no_padding(each, site, batch, kwargs) for each, site in zip(activations, sites, strict=True)]
        return output, activations, masks

    def _no_padding(self, activation: Tensor, site: Site, batch: Any, kwargs: dict[str, Any]) -> Tensor | None:
        # As compare reads them: what `inputs` made of the batch comes first, else the batch's own mask.
        mask = Masks.of(*((kwargs, batch) if self.inputs else (batch, kwargs))).at(site, activation)
        return None if mask is None or activation.ndim != 3 else token_mask(mask, "positions", activation, site=site)


class Stitched(nn.Module):
    """A network whose lower part is A's and whose upper part is B's; only the joint between them is its own."""

    def __init__(self, lower: CutModel, joint: Joint, upper: CutModel) -> None:
        super().__init__()
        self.lower, self.joint, self.upper = lower, joint, upper
        self.a, self.b = lower.model, upper.model

    def forward(self, batch: Any) -> Tensor:
        """The answer to a batch as the data give it: each of the two networks prepares it in its own way."""
        activation, mask = self.lower.representation(batch)
        refuse_padding(self.joint, mask)
        args, kwargs = self.upper.call(batch) if self.upper.cut.needs_input else ((), {})
        return answer_of(self.upper.cut.task(self.joint(activation), *args, **kwargs))


def answer_of(output: Any) -> Tensor:
    answer = answer_in(output)
    if answer is None:
        raise TypeError(f"the network answered with no tensor but {type(output).__name__}")
    return answer


def refuse_padding(joint: Joint, mask: Tensor | None) -> None:
    """Raise where A's tokens are padded (`mask` says which are not) and the joint would mix them."""
    if mask is not None and joint.reshapes:
        raise ValueError(
            f"A's tokens are padded, and padding would count where {joint.source} become {joint.target}: stitch at "
            "sites with the same tokens, or give inputs of one length"
        )


# The data: batches as they come, or all inputs at once where they are read many times


def look_into(data: Any) -> tuple[Any, Iterator[Any]]:
    """The first inputs, two of them if there are as many, and all batches with these among them.

    So an iterator that can be read only once is read only once.
    """
    batches = iter(Batches(open_data(data) if isinstance(data, str) else data))
    read: list[Any] = []
    with kept_random_state():
        while sum(map(count_inputs, read)) < TRIED and (batch := next(batches, None)) is not None:
            read.append(batch)
    return join(read), itertools.chain(read, batches)


def chunks_of(data: Any, max_rows: int | None, largest: int = CHUNK) -> Iterator[Chunk]:
    source = open_data(data) if isinstance(data, str) else data
    yield from recut(Batches(source), block=None, skip=0, max_rows=max_rows, largest=largest)


def read_inputs(data: Any, max_rows: int | None) -> Any:
    """All inputs as one batch, in the structure of the data's own."""
    with kept_random_state():
        return join([chunk.batch for chunk in chunks_of(data, max_rows)])


def in_chunks(inputs: Any) -> list[Any]:
    """The same inputs a chunk at a time, without a copy."""
    n = count_inputs(inputs)
    return [cut(inputs, start, min(start + CHUNK, n)) for start in range(0, n, CHUNK)]


def chunk_size(*sites: Site) -> int:
    """Inputs per forward: fewer where the activations of all sites would take too much memory."""
    return max(1, min(CHUNK, HELD // (4 * sum(math.prod(site.shape) for site in sites))))


# One pass of both networks over the data: the sums from which joints are fitted


def sums_of_pairs(
    models: tuple[CutModel, CutModel],
    sites: tuple[Sequence[Site], Sequence[Site]],
    joints: Mapping[Pair, Joint],
    data: Any,
    precision: Precision,
    max_rows: int | None,
) -> dict[Pair, JointSums]:
    """What the fits and measures of every pair of sites read: every position of an activation is a row.

    Pairs whose rows are the same positions share their sums. Merged chunk by chunk, so that memory does not grow.
    """
    groups: dict[Any, list[Pair]] = {}
    for pair, joint in joints.items():
        groups.setdefault((joint.target.space, joint.target.tokens), []).append(pair)
    totals: dict[Any, JointSums] = {}
    a, b = models
    with (
        as_found([a.model, b.model]),
        watch(a.model, [site.label for site in sites[0]]) as seen_a,
        watch(b.model, [site.label for site in sites[1]]) as seen_b,
        Progress(f"stitching {a.name} to {b.name}", None, "inputs") as bar,
    ):
        for chunk in chunks_of(data, max_rows, chunk_size(*sites[0], *sites[1])):
            _, at_a, masks_a = a.run(chunk.batch, seen_a, sites[0])
            _, at_b, masks_b = b.run(chunk.batch, seen_b, sites[1])
            for key, pairs in groups.items():
                masks = [_counting(joints[i, j], masks_a[i], masks_b[j]) for i, j in pairs]
                known = [mask for mask in masks if mask is not None]
                keep = functools.reduce(torch.logical_and, known) if known else None
                form, device = joints[pairs[0]].target, at_b[pairs[0][1]].device
                with products():
                    shapers = {i: joints[i, j] for i, j in pairs}
                    x = {i: as_block(joint.shaped(at_a[i]).to(device), form, keep) for i, joint in shapers.items()}
                    y = {j: as_block(at_b[j], form, keep) for _, j in pairs}
                    part = JointSums.of(x, y, pairs, PRECISIONS[precision], near=totals.get(key))
                totals[key] = totals[key].merge(part) if key in totals else part
            bar.advance(chunk.count)
    return {pair: totals[key] for key, pairs in groups.items() for pair in pairs}


def _counting(joint: Joint, mask_a: Tensor | None, mask_b: Tensor | None) -> Tensor | None:
    """Which positions at a joint are padding at neither site, (inputs, tokens); None: all count."""
    refuse_padding(joint, mask_a)
    if mask_a is None or mask_b is None:
        return mask_a if mask_b is None else mask_b
    if mask_a.shape != mask_b.shape:
        raise ValueError(f"need the same tokens at both sites, got {tuple(mask_a.shape)} and {tuple(mask_b.shape)}")
    return mask_a & mask_b


def as_block(activation: Tensor, form: Form, keep: Tensor | None = None) -> Tensor:
    """(parts, channels, rows of a part) without a copy where the layout allows; `keep`: positions that count."""
    wide = activation if activation.dtype in (torch.float32, torch.float64) else activation.float()
    if keep is not None:
        rows = (wide if form.tokens else wide.movedim(1, -1)).flatten(0, -2)
        return rows[keep.flatten().nonzero().flatten().to(rows.device)].T[None]
    if form.space and not form.tokens:
        maps = wide.flatten(2)
        return maps if maps.shape[2] >= PER_INPUT else maps.transpose(0, 1).flatten(1)[None]
    return wide.reshape(-1, wide.shape[-1]).T[None]
