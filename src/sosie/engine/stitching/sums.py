"""One pass of both networks over the data: the sums from which joints are fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...capture import as_found
from ...models.joint import Form, Joint
from ...process_state import products
from ...progress import Progress
from ...stats import JointMaker, JointSums
from .halves import Half, chunks_of, refuse_padding

Precision = Literal["float32", "float64"]
PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
PER_INPUT = 64  # positions from which an input's product pays for itself; smaller maps are joined into one lot of rows


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision is that of the products, {' or '.join(PRECISIONS)}, got {precision!r}")


def sums_at_joint(
    lower: Half, upper: Half, joint: Joint, data: Any, precision: Precision, max_rows: int | None
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
