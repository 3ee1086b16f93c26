"""What an axis of a tensor is made of, and when two axes must be permuted alike.

An axis is a leaf that may be permuted, a product of axes (flattened into one, the last running fastest) or axes one
after another (concatenated). Leaves are found to be the same, or to be made of smaller ones, as a forward is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

MISFIT = "one axis is cut in two ways that do not fit"

Kind = Literal["leaf", "product", "concatenation"]


class Axis:
    """One axis; a leaf with a reason is fixed: its entries stay where they are."""

    __slots__ = ("_now", "_parts", "kind", "reason", "size")

    def __init__(self, size: int, kind: Kind = "leaf", parts: Sequence[Axis] = (), reason: str | None = None) -> None:
        self.size, self.kind, self.reason = size, kind, reason
        self._parts = tuple(parts)
        self._now: Axis | None = None  # what a leaf turned out to be

    def found(self) -> Axis:
        """What this axis is known to be by now."""
        axis = self
        while axis._now is not None:
            axis = axis._now
        return axis

    def become(self, other: Axis) -> None:
        """A leaf is from now on that other axis."""
        self._now = other
        if self.reason is not None:
            fix(other, self.reason)

    @property
    def parts(self) -> list[Axis]:
        """The parts as they are known by now, without parts of parts of the same kind."""
        flat: list[Axis] = []
        for part in map(Axis.found, self._parts):
            flat += part.parts if part.kind == self.kind else [part]
        return flat


def leaf(size: int, reason: str | None = None) -> Axis:
    return Axis(size, reason=reason)


def product(parts: Sequence[Axis]) -> Axis:
    """The axis that flattening these gives."""
    kept = [part for part in parts if part.size != 1]
    if len(kept) == 1:
        return kept[0].found()
    return Axis(prod(part.size for part in kept), "product", kept) if kept else leaf(1)


def concatenation(parts: Sequence[Axis]) -> Axis:
    """The axis that these give one after another."""
    kept = [part for part in parts if part.size]
    if len(kept) == 1:
        return kept[0].found()
    return Axis(sum(part.size for part in kept), "concatenation", kept) if kept else leaf(0)


def leaves(axis: Axis) -> Iterator[Axis]:
    axis = axis.found()
    if axis.kind == "leaf":
        yield axis
    else:
        for part in axis.parts:
            yield from leaves(part)


def fix(axis: Axis, reason: str) -> None:
    """Let the entries of an axis stay where they are; the first reason is kept."""
    for part in leaves(axis):
        if part.reason is None:
            part.reason = reason


def unite(one: Axis, other: Axis) -> None:
    """Make two axes of one size the same, cutting leaves where the other side is made of smaller parts."""
    one, other = one.found(), other.found()
    if one is other or one.size <= 1:
        return
    if one.size != other.size:
        raise ValueError(f"axes of {one.size} and {other.size} entries cannot be the same")
    if one.kind != "leaf" and other.kind == "leaf":
        one, other = other, one
    if one.kind == "leaf" and one not in leaves(other):
        one.become(other)
    elif one.kind == other.kind:
        _unite_parts(one, other)
    else:
        _misfit(one, other)


def _unite_parts(one: Axis, other: Axis) -> None:
    ours, theirs = one.parts, other.parts
    while ours and theirs:
        x, y = ours.pop(0).found(), theirs.pop(0).found()
        if x.size == y.size:
            unite(x, y)
            continue
        larger, size = (x, y.size) if x.size > y.size else (y, x.size)
        rest = _cut(larger, size, one.kind)
        if rest is None:
            _misfit(one, other)
            return
        first, second = rest
        unite(first, y if larger is x else x)
        (ours if larger is x else theirs).insert(0, second)


def _cut(axis: Axis, size: int, kind: Kind) -> tuple[Axis, Axis] | None:
    """A leaf as two: its slower `size` entries and the rest of a product, or its first entries and the rest."""
    if axis.kind != "leaf" or (kind == "product" and axis.size % size):
        return None
    rest = axis.size // size if kind == "product" else axis.size - size
    parts = leaf(size), leaf(rest)
    axis.become(Axis(axis.size, kind, parts))
    return parts


def _misfit(*axes: Axis) -> None:
    for axis in axes:
        fix(axis, MISFIT)


def regroup(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis] | None:
    """The axes of a tensor seen in another shape; None where an axis would have to be cut that cannot be."""
    factors = [part for axis in axes for part in _factors(axis)]
    found = []
    for size in shape:
        taken: list[Axis] = []
        while (missing := size // prod(part.size for part in taken)) > 1:
            if not factors:
                return None
            part = factors.pop(0).found()
            if missing % part.size:
                pieces = _cut(part, missing, "product")
                if pieces is None:
                    return None
                part, rest = pieces
                factors.insert(0, rest)
            taken.append(part)
        found.append(product(taken) if taken else leaf(size))
    return found


def _factors(axis: Axis) -> list[Axis]:
    axis = axis.found()
    return axis.parts if axis.kind == "product" else [axis] if axis.size != 1 else []


def stretch_of(axis: Axis, start: int, stop: int) -> Axis | None:
    """The axis of the entries from `start` up to `stop`; None where that cuts through what cannot be cut."""
    axis = axis.found()
    if (start, stop) == (0, axis.size):
        return axis
    if axis.kind == "leaf":
        middle = leaf(stop - start)
        axis.become(concatenation([leaf(start), middle, leaf(axis.size - stop)]))
        return middle.found()
    if axis.kind == "product":
        first, rest = axis.parts[0], product(axis.parts[1:])
        if start % rest.size or stop % rest.size:
            return None
        piece = stretch_of(first, start // rest.size, stop // rest.size)
        return None if piece is None else product([piece, rest])
    covered, offset = [], 0
    for part in axis.parts:
        low, high = max(start - offset, 0), min(stop - offset, part.size)
        offset += part.size
        if low < high:
            piece = stretch_of(part, low, high)
            if piece is None:
                return None
            covered.append(piece)
    return concatenation(covered)


def order_of(axis: Axis, orders: Mapping[Axis, Tensor]) -> Tensor:
    """(size,): which entry comes where once each leaf is in its order; a leaf without one stays as it is."""
    axis = axis.found()
    if axis.kind == "leaf":
        return orders[axis] if axis in orders else torch.arange(axis.size)
    if axis.kind == "concatenation":
        found, offset = [], 0
        for part in axis.parts:
            found.append(order_of(part, orders) + offset)
            offset += part.size
        return torch.cat(found)
    whole = torch.zeros(1, dtype=torch.long)
    for part in axis.parts:
        whole = (whole[:, None] * part.size + order_of(part, orders)[None, :]).flatten()
    return whole


def places_of(axis: Axis, wanted: Axis) -> list[Tensor]:
    """For each time a leaf occurs in an axis, (leaf.size, k): the entries that belong to each entry of the leaf."""
    axis = axis.found()
    if axis is wanted:
        return [torch.arange(axis.size)[:, None]]
    if axis.kind == "leaf":
        return []
    found: list[Tensor] = []
    if axis.kind == "concatenation":
        offset = 0
        for part in axis.parts:
            found += [places + offset for places in places_of(part, wanted)]
            offset += part.size
        return found
    everything = torch.arange(axis.size).view([part.size for part in axis.parts])
    for i, part in enumerate(axis.parts):
        along = everything.movedim(i, 0).flatten(1)
        found += [along[places].flatten(1) for places in places_of(part, wanted)]
    return found


def repeated(axis: Axis) -> set[Axis]:
    """Leaves that are more than one factor of an axis: their order does not act on it by moving whole slices."""
    axis = axis.found()
    if axis.kind == "leaf":
        return set()
    inside = [set(leaves(part)) for part in axis.parts]
    found = set().union(*(repeated(part) for part in axis.parts))
    if axis.kind == "product":
        found |= {each for i, here in enumerate(inside) for there in inside[:i] for each in here & there}
    return found
