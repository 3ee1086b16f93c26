"""What an axis of a tensor is made of, and when two axes must be permuted alike.

An axis is a leaf that may be permuted, a product of axes (flattened into one, the last running fastest) or axes one
after another (concatenated). Leaves are found to be the same, or to be made of smaller ones, as a forward is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture import as_found
from ..capture.structure import tensors_in
from ..process_state import attention_in_parts

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


# One operation of a forward, and what is known of the axes of its tensors

PLACE = "positions keep their order"
CONSTANT = "a constant of the forward"
INPUT = "the model's input"
OUTPUT = "the model's output"
ORDINARY = frozenset({PLACE, CONSTANT, INPUT, OUTPUT})  # nothing to report: such axes have no other order


class NotUnderstood(Exception):
    """A rule met something it does not cover: all axes of the operation are then fixed."""


@dataclass
class Known:
    """The axes of every tensor met so far. The tensors are held, so that no number names two of them."""

    axes: dict[int, list[Axis]] = field(default_factory=dict)
    held: dict[int, Tensor] = field(default_factory=dict)
    by_storage: dict[int, list[int]] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> list[Axis]:
        if id(tensor) not in self.axes:  # made outside the forward, and no parameter or buffer
            self.set(tensor, [leaf(size, CONSTANT) for size in tensor.shape])
        return self.axes[id(tensor)]

    def set(self, tensor: Tensor, axes: Sequence[Axis]) -> None:
        if [axis.size for axis in axes] != list(tensor.shape):
            raise NotUnderstood
        if id(tensor) not in self.held:
            self.held[id(tensor)] = tensor
            self.by_storage.setdefault(_storage(tensor), []).append(id(tensor))
        self.axes[id(tensor)] = list(axes)

    def sharing(self, tensor: Tensor) -> list[list[Axis]]:
        """The axes of other tensors that lie in the same memory, where those are not just this one's."""
        own = [axis.found() for axis in self.of(tensor)]
        others = [self.axes[key] for key in self.by_storage[_storage(tensor)] if key != id(tensor)]
        return [axes for axes in others if [axis.found() for axis in axes] != own]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Call:
    """An operation with its arguments by name, what it gave, and the module in which it ran."""

    name: str  # without a trailing underscore: what is written in place reads like any other
    overload: str
    in_place: bool
    pointwise: bool
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]
    where: str

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any, where: str) -> Call:
        names = [argument.name for argument in func._schema.arguments]
        defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        outputs = tuple(out for out in _tensors(output))
        return cls(
            name=func.overloadpacket.__name__.rstrip("_"),
            overload=func._overloadname,
            in_place=bool(func._schema.is_mutable) and any(out is a for out in outputs for a in _tensors([args])),
            pointwise=torch.Tag.pointwise in func.tags,
            arguments={**defaults, **dict(zip(names, args, strict=False)), **kwargs},
            outputs=outputs,
            where=where,
        )

    @property
    def tensors(self) -> list[Tensor]:
        return _tensors(list(self.arguments.values()))

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def __str__(self) -> str:
        return f"{self.name} in {self.where or 'the model itself'}"


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, (list, tuple)):
        return [tensor for each in part for tensor in _tensors(each)]
    return []


def broadcast(known: Known, tensors: Sequence[Tensor], shape: Sequence[int]) -> list[Axis]:
    """The axes of what tensors give entry by entry: those that meet are the same."""
    found: list[Axis | None] = [None] * len(shape)
    for tensor in tensors:
        for i, axis in enumerate(reversed(known.of(tensor)), 1):
            if i > len(shape) or axis.size not in (1, shape[-i]):
                raise NotUnderstood
            if axis.size == 1:
                continue
            if (before := found[-i]) is not None:
                unite(before, axis)
            found[-i] = axis
    return [leaf(size) if axis is None else axis.found() for axis, size in zip(found, shape, strict=True)]


def not_understood(known: Known, call: Call) -> None:
    """Fix every axis of an operation, with its name as the reason."""
    for tensor in call.tensors:
        for axis in known.of(tensor):
            fix(axis, str(call))
    for output in call.outputs:
        known.set(output, [leaf(size, str(call)) for size in output.shape])


# What each operation of a forward says about the axes of its tensors

Rule = Callable[[Known, Call], list[Axis]]  # the axes of the (first) output

POINTWISE = {"_prelu_kernel", "hardswish", "copy", "native_dropout", "dropout"}  # pointwise, but not marked so
SAME = {"_softmax", "_log_softmax", "_safe_softmax", "_to_copy", "detach", "alias", "lift_fresh", "contiguous"}
UNIFORM = re.compile(r"(new_)?(zeros|ones|full|empty|empty_strided)(_like)?|scalar_tensor")
REDUCTIONS = {"mean", "sum", "amax", "amin", "var", "std", "prod", "logsumexp", "linalg_vector_norm", "any", "all"}
OVER_PLACES = re.compile(r"(_?adaptive_)?(avg|max)_pool([123])d.*|_?upsample_\w+([123])d.*|\w+_pad([123])d")
BATCH_NORM = re.compile(r"_?(native|cudnn|miopen)?_?batch_norm.*")
VIEWS = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias"}


def find_rule(call: Call) -> Rule | None:
    """The rule of an operation; None where there is none."""
    if call.pointwise or call.name in POINTWISE:
        return lambda known, call: broadcast(known, call.tensors, call.outputs[0].shape)
    if call.name in RULES:
        return RULES[call.name]
    for names, rule in FAMILIES:
        if call.name in names if isinstance(names, set) else names.fullmatch(call.name):
            return rule
    return None


def _same(known: Known, call: Call) -> list[Axis]:
    return known.of(call.tensors[0])


def _uniform(known: Known, call: Call) -> list[Axis]:
    # Equal entries look the same in any order.
    return [leaf(size) for size in call.outputs[0].shape]


def _reduction(known: Known, call: Call) -> list[Axis]:
    axes = known.of(call.tensors[0])
    if call["dim"] is None or call["dim"] == []:
        dims = set(range(len(axes)))
    else:
        given = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
        dims = {dim % len(axes) for dim in given}
    if call["keepdim"]:
        return [leaf(1) if i in dims else axis for i, axis in enumerate(axes)]
    return [axis for i, axis in enumerate(axes) if i not in dims]


def _over_places(known: Known, call: Call) -> list[Axis]:
    axes = known.of(call.tensors[0])
    count = int(next(each for each in re.findall(r"([123])d", call.name)))
    for axis in axes[-count:]:
        fix(axis, PLACE)
    return axes[:-count] + [leaf(size, PLACE) for size in call.outputs[0].shape[-count:]]


def _convolution(known: Known, call: Call) -> list[Axis]:
    images, weight = known.of(call["input"]), known.of(call["weight"])
    for axis in (*images[2:], *weight[2:]):
        fix(axis, PLACE)
    before, after = (weight[0], weight[1]) if call["transposed"] else (weight[1], weight[0])
    groups = call["groups"]
    if groups == 1:
        unite(images[1], before)
        channels = after
    else:
        # Groups may change places, and entries within all groups alike: less than there is, but whole axes.
        slow = leaf(groups)
        within, outer = (weight[1], weight[0])
        fast = leaf(outer.size // groups)
        unite(outer, product([slow, fast]))
        ins, outs = (fast, within) if call["transposed"] else (within, fast)
        unite(images[1], product([slow, ins]))
        channels = product([slow, outs])
    if call["bias"] is not None:
        unite(known.of(call["bias"])[0], channels)
    return [images[0], channels.found(), *(leaf(size, PLACE) for size in call.outputs[0].shape[2:])]


def _batch_norm(known: Known, call: Call) -> list[Axis]:
    axes = known.of(call.tensors[0])
    for tensor in call.tensors[1:]:
        if tensor.shape == (axes[1].size,):
            unite(axes[1], known.of(tensor)[0])
        elif tensor.numel():
            raise NotUnderstood
    return axes


def _group_norm(known: Known, call: Call) -> list[Axis]:
    axes, groups = known.of(call["input"]), call["group"]
    unite(axes[1], product([leaf(groups), leaf(axes[1].size // groups)]))
    for tensor in call.tensors[1:]:
        unite(axes[1], known.of(tensor)[0])
    return axes


def _layer_norm(known: Known, call: Call) -> list[Axis]:
    return broadcast(known, call.tensors, call.outputs[0].shape)


def _linear(known: Known, call: Call) -> list[Axis]:
    x, weight = known.of(call["input"]), known.of(call["weight"])
    unite(x[-1], weight[1])
    return _plus(known, call["bias"], [*x[:-1], weight[0]])


def _plus(known: Known, added: Tensor | None, axes: Sequence[Axis]) -> list[Axis]:
    """Unite the axes of what is added, which may be broadcast."""
    if added is not None:
        for axis, other in zip(reversed(axes), reversed(known.of(added)), strict=False):
            if other.size != 1:
                unite(axis, other)
    return list(axes)


def _matrix_product(known: Known, call: Call) -> list[Axis]:
    x, y = (known.of(tensor) for tensor in call.tensors[-2:])
    added = call.tensors[0] if len(call.tensors) == 3 else None
    batch = len(x) - 2 if len(x) == len(y) else 0
    for one, other in zip(x[:batch], y[:batch], strict=True):
        unite(one, other)
    unite(x[-1], y[-2] if len(y) > 1 else y[-1])
    return _plus(known, added, [*x[:-1], *(y[-1:] if len(y) > 1 else [])])


def _attention(known: Known, call: Call) -> list[Axis]:
    query, key, value = (known.of(call[name]) for name in ("query", "key", "value"))
    for one, other in (*zip(query[:-2], key[:-2], strict=True), *zip(key[:-2], value[:-2], strict=True)):
        if one.size != other.size:
            raise NotUnderstood
        unite(one, other)
    unite(query[-1], key[-1])
    unite(key[-2], value[-2])
    if len(call.tensors) > 3 or call["is_causal"]:
        for axis in (query[-2], key[-2], *(axis for mask in call.tensors[3:] for axis in known.of(mask))):
            fix(axis, PLACE)
    return [*query[:-1], value[-1]]


def _embedding(known: Known, call: Call) -> list[Axis]:
    weight = known.of(call["weight"])
    fix(weight[0], INPUT)
    return [*known.of(call["indices"]), weight[1]]


def _view(known: Known, call: Call) -> list[Axis]:
    found = regroup(known.of(call.tensors[0]), call.outputs[0].shape) if call.overload != "dtype" else None
    if found is None:
        raise NotUnderstood
    return found


def _permute(known: Known, call: Call) -> list[Axis]:
    axes = known.of(call.tensors[0])
    if call.name == "permute":
        return [axes[dim] for dim in call["dims"]]
    one, other = (0, -1) if call.name == "t" else (call["dim0"], call["dim1"])
    swapped = list(axes)
    if swapped:
        swapped[one], swapped[other] = axes[other], axes[one]
    return swapped


def _expand(known: Known, call: Call) -> list[Axis]:
    axes, shape = known.of(call.tensors[0]), call.outputs[0].shape
    padded = [leaf(1)] * (len(shape) - len(axes)) + list(axes)
    return [axis if axis.size == size else leaf(size) for axis, size in zip(padded, shape, strict=True)]


def _pick(known: Known, call: Call) -> list[Axis]:
    axes = list(known.of(call.tensors[0]))
    fix(axes.pop(call["dim"]), PLACE)
    return axes


def _piece(axis: Axis, start: int, stop: int) -> Axis:
    reasons = [part.reason for part in leaves(axis)]
    if all(reason is not None for reason in reasons):
        return leaf(stop - start, reasons[0])
    found = stretch_of(axis, start, stop)
    if found is None:
        raise NotUnderstood
    return found


def _slice(known: Known, call: Call) -> list[Axis]:
    axes, dim = list(known.of(call.tensors[0])), call["dim"]
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(axes[dim].size)
    if step != 1:
        fix(axes[dim], str(call))
        axes[dim] = leaf(call.outputs[0].shape[dim], next(leaves(axes[dim])).reason)
    else:
        axes[dim] = _piece(axes[dim], start, max(start, stop))
    return axes


def _split(known: Known, call: Call) -> list[Axis]:
    axes, dim, start = known.of(call.tensors[0]), call["dim"], 0
    pieces = []
    for output in call.outputs:
        stop = start + output.shape[dim]
        pieces.append(_piece(axes[dim], start, stop))
        start = stop
    for output, piece in zip(call.outputs, pieces, strict=True):
        whole = list(axes)
        whole[dim] = piece
        known.set(output, whole)
    return known.of(call.outputs[0])


def _concatenate(known: Known, call: Call) -> list[Axis]:
    tensors = [tensor for tensor in call.tensors if tensor.shape != (0,)]
    dim = call["dim"] % tensors[0].ndim
    whole = list(known.of(tensors[0]))
    for tensor in tensors[1:]:
        for i, axis in enumerate(known.of(tensor)):
            if i != dim:
                unite(whole[i], axis)
    whole[dim] = concatenation([known.of(tensor)[dim] for tensor in tensors])
    return whole


def _stack(known: Known, call: Call) -> list[Axis]:
    axes = broadcast(known, call.tensors, call.tensors[0].shape)
    axes.insert(call["dim"] % (len(axes) + 1), leaf(len(call.tensors), PLACE))
    return axes


def _pad(known: Known, call: Call) -> list[Axis]:
    axes, pad = list(known.of(call.tensors[0])), call["pad"]
    if min(pad) < 0:
        raise NotUnderstood
    for i in range(len(pad) // 2):
        low, high = pad[2 * i : 2 * i + 2]
        dim = len(axes) - 1 - i
        if low + high:
            # What is filled in is the same everywhere, so has no order of its own.
            axes[dim] = concatenation([leaf(low), axes[dim], leaf(high)])
    return axes


RULES: dict[str, Rule] = {
    "convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "linear": _linear,
    "embedding": _embedding,
    "expand": _expand,
    "slice": _slice,
    "select": _pick,
    "cat": _concatenate,
    "stack": _stack,
    "constant_pad_nd": _pad,
}
FAMILIES: tuple[tuple[set[str] | re.Pattern[str], Rule], ...] = (
    (SAME, _same),
    (UNIFORM, _uniform),
    (REDUCTIONS, _reduction),
    (OVER_PLACES, _over_places),
    (BATCH_NORM, _batch_norm),
    (VIEWS, _view),
    ({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}, _matrix_product),
    ({"t", "transpose", "permute"}, _permute),
    ({"split", "split_with_sizes", "unsafe_split"}, _split),
    (re.compile(r"_scaled_dot_product_\w+"), _attention),
)


# Reading one forward: which axes of which weights must be permuted together for the function to stay the same

UNUSED = "not used in the forward"
REPEATED = "one axis is twice a factor of another"


@dataclass(frozen=True)
class WeightAxes:
    """The axes of every parameter and buffer, and the groups of them that share a permutation."""

    of: dict[str, tuple[Axis, ...]]  # by the tensor's first name; scalars are left out
    groups: dict[str, Axis]  # what may be permuted, in execution order; named after the first axis that holds it
    fixed: dict[str, str]  # axes of parameters that are held in place for want of an understanding, and why

    def members(self, group: str) -> list[tuple[str, int]]:
        """The axes that hold a group, as the tensor's name and the axis's number."""
        wanted = self.groups[group]
        return [(name, i) for name, axes in self.of.items() for i, axis in enumerate(axes) if wanted in leaves(axis)]

    def without(self, groups: dict[str, str]) -> WeightAxes:
        """The same with some groups fixed, each for a reason."""
        kept = {name: axis for name, axis in self.groups.items() if name not in groups}
        return WeightAxes(self.of, kept, {**self.fixed, **groups})


def weight_axes(model: nn.Module, *inputs: Any) -> WeightAxes:
    """Run the model once on these inputs, in eval mode, and read from it which axes of weights belong together.

    Axes of the input and of the output keep their order. So does what goes through an operation that is not
    understood, and that is named. Symmetries that are not whole axes in another order are left out: heads of attention
    or groups of a convolution are permuted within all alike.
    """
    known = Known()
    tensors = named_weights(model)
    for tensor in tensors.values():
        known.set(tensor, [leaf(size) for size in tensor.shape])
    with as_found(model), attention_in_parts, _Reader(known, model) as reader:
        for tensor in tensors_in(inputs):
            known.set(tensor, [leaf(size, INPUT) for size in tensor.shape])
        outputs = model(*inputs)
    for tensor in tensors_in(outputs):
        for axis in known.of(tensor):
            fix(axis, OUTPUT)
    for key, tensor in known.held.items():
        if key not in reader.used and any(tensor is weight for weight in tensors.values()):
            for axis in known.of(tensor):
                fix(axis, UNUSED)
    return _grouped(model, {name: tuple(known.of(tensor)) for name, tensor in tensors.items()}, reader.order)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that have axes, each once, under its first name."""
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in found if tensor.ndim}


def _grouped(model: nn.Module, of: dict[str, tuple[Axis, ...]], order: dict[int, int]) -> WeightAxes:
    for axes in of.values():
        for axis in axes:
            for each in repeated(axis):
                fix(each, REPEATED)
    groups: dict[Axis, str] = {}
    fixed: dict[str, str] = {}
    tensors = named_weights(model)
    by_use = sorted(of, key=lambda name: order.get(id(tensors[name]), len(order)))
    parameters = {name for name, _ in model.named_parameters()}
    for name in by_use:
        for i, axis in enumerate(of[name]):
            label = f"{name}[{i}]"
            free = [each for each in leaves(axis) if each.reason is None and each.size > 1]
            for each in free:
                again = sum(other.partition("#")[0] == label for other in groups.values())
                groups.setdefault(each, f"{label}#{again + 1}" if again else label)
            odd = [each.reason for each in leaves(axis) if each.reason is not None and each.reason not in ORDINARY]
            if odd and axis.size > 1 and name in parameters:
                fixed[label] = str(odd[0])
    return WeightAxes(of, {name: axis for axis, name in groups.items()}, fixed)


class _Reader(TorchDispatchMode):
    """Sees every operation of a forward and writes down what it says about axes."""

    def __init__(self, known: Known, model: nn.Module) -> None:
        super().__init__()
        self._known, self._model = known, model
        self._inside: list[str] = []
        self._hooks = ExitStack()
        self.used: set[int] = set()
        self.order: dict[int, int] = {}  # of the tensors, as they are first used

    def __enter__(self) -> _Reader:
        for name, module in self._model.named_modules():

            def enter(*_: Any, name: str = name) -> None:
                self._inside.append(name)

            def leave(*_: Any) -> None:
                self._inside.pop()

            self._hooks.callback(module.register_forward_pre_hook(enter).remove)
            self._hooks.callback(module.register_forward_hook(leave).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        call = Call.of(func, args, kwargs or {}, output, self._inside[-1] if self._inside else "")
        for tensor in call.tensors:
            self.used.add(id(tensor))
            self.order.setdefault(id(tensor), len(self.order))
        self._read(call)
        return output

    def _read(self, call: Call) -> None:
        known, rule = self._known, find_rule(call)
        if call.in_place and (rule is None or len(call.tensors) > 1):
            # What is written into a part of another tensor changes that one too.
            others = [axes for output in call.outputs for axes in known.sharing(output)]
            if others:
                for axis in (axis for axes in others for axis in axes):
                    fix(axis, str(call))
                rule = None
        try:
            if rule is None or not call.outputs:
                raise NotUnderstood
            first = rule(known, call)
            known.set(call.outputs[0], first)
            self._label_rest(call, first)
        except NotUnderstood:
            not_understood(known, call)

    def _label_rest(self, call: Call, first: list[Axis]) -> None:
        """Further outputs: indices beside what was pooled, sums kept for a gradient."""
        for output in call.outputs[1:]:
            if id(output) not in self._known.axes:
                alike = output.shape == call.outputs[0].shape
                self._known.set(output, first if alike else [leaf(size, str(call)) for size in output.shape])
