"""The two networks of a stitch, each cut at a site, and the network of the one's lower and the other's upper part."""

from __future__ import annotations

import itertools
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
    NoData,
    Site,
    answer_in,
    as_found,
    by_input,
    count_inputs,
    cut,
    mixing_note,
    model_arguments,
    recut,
    to_rows,
    watch,
)
from ..capture.rows import token_mask
from ..capture.structure import join
from ..data import open_data
from ..models import open_model, weights_of, with_name
from ..process_state import kept_random_state, products
from ..progress import Progress
from .cuts import Cut, LeakingCut
from .joint import Form, Joint, JointMaker, JointSums, Resize

CHUNK = 128  # inputs that both networks are run on at a time
TRIED = 2  # inputs that a cut is tried on: whether it leaks shows on two


@dataclass
class CutModel:
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
                return by_input(to_rows(activation, "flatten", site=site, inputs=chunk.count))

            args, kwargs = self.call(chunk.batch)
            with watch(self.model, [site.label for site in sites], sink=receive) as seen:
                seen.run(*args, **kwargs)
            return dict(seen.items())

        with as_found(self.model):
            return mixing_note(self.name, self.model, batch, read)


class Stitched(nn.Module):
    """A network whose lower part is A's and whose upper part is B's; only the joint between them is its own."""

    def __init__(self, lower: CutModel, joint: Joint, upper: CutModel) -> None:
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


def open_half(model: Any, site: str, prepare: Any, inputs: Any, batch: Any) -> CutModel:
    """A network cut at one site; the cut is tried on a batch."""
    half = open_network(model, prepare, inputs)
    args, kwargs = half.call(batch)
    half.cut = Cut(half.model, site, *args, **kwargs)
    return half


def open_network(model: Any, prepare: Any, inputs: Any) -> CutModel:
    """A network that has yet to be cut."""
    if isinstance(model, (str, os.PathLike)):
        model = open_model(str(model))
    weights = weights_of(model)
    model, name, prepare = with_name(model, prepare)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"cannot stitch {name}: give a torch.nn.Module or a specification like 'tiny10@weights.safetensors'"
        )
    return CutModel(name, model, None, prepare, inputs, weights)  # type: ignore[arg-type]


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


# One pass of both networks over the data: the sums from which joints are fitted

Precision = Literal["float32", "float64"]
PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
PER_INPUT = 64  # positions from which an input's product pays for itself; smaller maps are joined into one lot of rows


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision is that of the products, {' or '.join(PRECISIONS)}, got {precision!r}")


def sums_at_joint(
    lower: CutModel, upper: CutModel, joint: Joint, data: Any, precision: Precision, max_rows: int | None
) -> JointSums:
    """Of both sites' rows, A's in the shape of B's; merged chunk by chunk, so that memory does not grow."""
    maker = JointMaker(PRECISIONS[precision])
    total: JointSums | None = None
    with (
        as_found([lower.model, upper.model]),
        Progress(f"stitching {lower.name} to {upper.name}", None, "inputs") as bar,
    ):
        for chunk in chunks_of(data, max_rows):
            (a, of_a), (b, of_b) = lower.tokens(chunk.batch), upper.tokens(chunk.batch)
            keep = no_padding(joint, of_a, of_b)
            with products():
                part = joint_part(maker, {0: joint.shaped(a)}, {0: b}, [(0, 0)], joint.target, keep)
            total = part if total is None else total.merge(part)
            bar.advance(chunk.count)
    if total is None:
        raise ValueError("the data yielded no inputs")
    return total


def joint_part(
    maker: JointMaker,
    a: Mapping[int, Tensor],
    b: Mapping[int, Tensor],
    pairs: Sequence[tuple[int, int]],
    form: Form,
    keep: Tensor | None = None,
) -> JointSums:
    """The sums of one chunk, from activations that have the form's positions; `keep`: those that count, None: all."""
    device = next(iter(b.values())).device
    x, y = ({k: as_block(each.to(device), form, keep) for k, each in side.items()} for side in (a, b))
    with products():
        return maker.part(x, y, pairs)


def no_padding(joint: Joint, of_a: Tensor | None, of_b: Tensor | None) -> Tensor | None:
    """Which positions at the joint are padding at neither site, (inputs, tokens); None: all count."""
    refuse_padding(joint, of_a)
    if of_a is None or of_b is None:
        return of_a if of_b is None else of_b
    if of_a.shape != of_b.shape:
        raise ValueError(f"need the same tokens at both sites, got {tuple(of_a.shape)} and {tuple(of_b.shape)}")
    return of_a & of_b


def as_block(activation: Tensor, form: Form, keep: Tensor | None = None) -> Tensor:
    """(parts, channels, rows of a part): every position is a row; without a copy where the layout allows."""
    wide = activation if activation.dtype in (torch.float32, torch.float64) else activation.float()
    if keep is not None:
        rows = (wide if form.tokens else wide.movedim(1, -1)).flatten(0, -2)
        return rows[keep.flatten().nonzero().flatten().to(rows.device)].T[None]
    if form.space and not form.tokens:
        maps = wide.flatten(2)
        return maps if maps.shape[2] >= PER_INPUT else maps.transpose(0, 1).flatten(1)[None]
    return wide.reshape(-1, wide.shape[-1]).T[None]


# Which sites of two networks are stitched, and how: pairs, cuts of B, and the joint's form of each

Pairs = Literal["diagonal", "all"]
Pair = tuple[int, int]
PROBE = 2  # inputs that are run first, to learn the order and the shapes of the sites


@dataclass
class SitePairs:
    """The sites of both sides, numbered in execution order, and what there is to fit."""

    a: tuple[Site, ...]
    b: tuple[Site, ...]
    cuts: dict[int, Cut] = field(default_factory=dict)  # of B, by site
    joints: dict[Pair, Joint] = field(default_factory=dict)
    refused: dict[Pair, str] = field(default_factory=dict)  # pairs whose shapes cannot be joined, and why
    leaking: tuple[str, ...] = ()  # sites of B left out because something goes around them

    def groups(self) -> dict[Form, list[Pair]]:
        """Pairs whose rows are the same positions, under one of their forms."""
        found: dict[tuple[Any, ...], list[Pair]] = {}
        for pair, joint in self.joints.items():
            found.setdefault((joint.target.space, joint.target.tokens), []).append(pair)
        return {self.joints[pairs[0]].target: pairs for pairs in found.values()}


def find_pairs(
    halves: tuple[CutModel, CutModel], sites: tuple[Any, Any], pairs: Pairs, batch: Any, resize: Resize
) -> SitePairs:
    """Pair up the sites, cut B at each of its own, and see which pairs can be joined."""
    if pairs not in ("diagonal", "all"):
        raise ValueError(f"pairs is 'diagonal' (sites in their order) or 'all', got {pairs!r}")
    a, b = (_look(half, chosen, batch) for half, chosen in zip(halves, sites, strict=True))
    if pairs == "diagonal" and len(a) != len(b):
        names = [", ".join(site.label for site in side[:4]) + (", …" if len(side) > 4 else "") for side in (a, b)]
        raise ValueError(
            f"sites pair up in their order, but there are {len(a)} of A ({names[0]}) and {len(b)} of B ({names[1]}): "
            "choose as many with sites_a= and sites_b=, or pairs='all'"
        )
    cuts, leaking = _cuts(halves[1], b, batch, named=sites[1] is not None)
    kept = [j for j in range(len(b)) if j in cuts]
    if not kept:
        raise LeakingCut(f"something goes around every site of {halves[1].name}: {', '.join(leaking)}")
    of_a = kept if pairs == "diagonal" else list(range(len(a)))
    found = SitePairs(
        tuple(a[i] for i in of_a), tuple(b[j] for j in kept), {k: cuts[j] for k, j in enumerate(kept)}, leaking=leaking
    )
    for j in range(len(found.b)):
        for i in [j] if pairs == "diagonal" else range(len(found.a)):
            try:
                source, target = (Form.of(site.shape, site.channels_last) for site in (found.a[i], found.b[j]))
                found.joints[i, j] = Joint(source, target, resize)
            except ValueError as error:
                found.refused[i, j] = str(error)
    if not found.joints:
        raise ValueError(f"no pair of sites can be joined: {next(iter(found.refused.values()))}")
    return found


def _look(half: CutModel, sites: Any, batch: Any) -> tuple[Site, ...]:
    count = min(PROBE, count_inputs(batch))
    args, kwargs = half.call(cut(batch, 0, count))

    def check(site: Site, activation: Tensor) -> None:
        to_rows(activation, "flatten", site=site, inputs=count)  # leaves out what gives no rows

    with as_found(half.model), watch(half.model, sites, sink=check) as seen:
        seen.run(*args, **kwargs)
    return seen.sites


def _cuts(half: CutModel, sites: Sequence[Site], batch: Any, *, named: bool) -> tuple[dict[int, Cut], tuple[str, ...]]:
    """B cut at every site; a leak is an error where the sites were asked for, else the site is left out."""
    args, kwargs = half.call(batch)
    cuts, leaking = {}, []
    for j, site in enumerate(sites):
        try:
            found = Cut(half.model, site.label, *args, **kwargs)
            found.check(*args, **kwargs)
        except LeakingCut:
            if named:
                raise
            leaking.append(site.label)
        else:
            cuts[j] = found
    return cuts, tuple(leaking)
