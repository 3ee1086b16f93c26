"""The axes of a network's weights that must be permuted together so that it computes the same as before.

An axis is a leaf that may be permuted, a product of axes (flattened into one, the last running fastest) or a
concatenation. They are read from one forward, operation by operation: a rule for each says which axes of its tensors
are the same, or are made of smaller ones.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from ..capture import as_found, kept_attributes
from ..capture.layout import Operation
from ..capture.sites import tensors_in
from ..process_state import OperationMode, attention_in_parts

MISFIT = "one axis is cut in two incompatible ways"

Kind = Literal["leaf", "product", "concatenation"]


class NotUnderstood(Exception):
    """Raised for an operation or a shape that no rule covers: all axes of the operation are then fixed."""


class Axis:
    """One axis; a leaf with a reason is fixed: its entries stay where they are."""

    __slots__ = ("_now", "_parts", "kind", "reason", "size")

    def __init__(self, size: int, reason: str | None = None, kind: Kind = "leaf", parts: Sequence[Axis] = ()) -> None:
        self.size, self.reason, self.kind = size, reason, kind
        self._parts = tuple(parts)
        self._now: Axis | None = None  # what a leaf turned out to be

    def resolve(self) -> Axis:
        """The axis that this one turned out to be."""
        axis = self
        while axis._now is not None:
            axis = axis._now
        return axis

    def become(self, other: Axis) -> None:
        """Make this leaf the same as another axis."""
        self._now = other
        if self.reason is not None:
            fix(other, self.reason)

    @property
    def parts(self) -> list[Axis]:
        """The resolved parts, without nested parts of the same kind."""
        flat: list[Axis] = []
        for part in map(Axis.resolve, self._parts):
            flat += part.parts if part.kind == self.kind else [part]
        return flat


def product(parts: Sequence[Axis]) -> Axis:
    """The axis that flattening these gives."""
    parts = [part for part in parts if part.size != 1] or [Axis(1)]
    return parts[0].resolve() if len(parts) == 1 else Axis(prod(part.size for part in parts), None, "product", parts)


def concatenation(parts: Sequence[Axis]) -> Axis:
    """The axis that concatenating these gives."""
    parts = [part for part in parts if part.size] or [Axis(0)]
    size = sum(part.size for part in parts)
    return parts[0].resolve() if len(parts) == 1 else Axis(size, None, "concatenation", parts)


def leaves(axis: Axis) -> list[Axis]:
    """The resolved leaves that an axis is made of."""
    axis = axis.resolve()
    return [axis] if axis.kind == "leaf" else [leaf for part in axis.parts for leaf in leaves(part)]


def fix(axis: Axis, reason: str) -> None:
    """Keep the entries of an axis where they are; the first reason is kept."""
    for part in leaves(axis):
        if part.reason is None:
            part.reason = reason


def unite(a: Axis, b: Axis) -> None:
    """Make two axes of one size the same, cutting leaves if the other side is made of smaller parts."""
    a, b = a.resolve(), b.resolve()
    if a is b or a.size <= 1:
        return
    if a.size != b.size:
        raise ValueError(f"axes of {a.size} and {b.size} entries cannot be the same")
    if a.kind != "leaf" and b.kind == "leaf":
        a, b = b, a
    if a.kind == "leaf" and a not in leaves(b):
        a.become(b)
        return
    try:
        if a.kind != b.kind:
            raise NotUnderstood
        parts_a, parts_b = a.parts, b.parts
        while parts_a and parts_b:
            x, y = parts_a.pop(0).resolve(), parts_b.pop(0).resolve()
            if x.size > y.size:
                x, rest = _cut(x, y.size, a.kind)
                parts_a.insert(0, rest)
            elif x.size < y.size:
                y, rest = _cut(y, x.size, a.kind)
                parts_b.insert(0, rest)
            unite(x, y)
    except NotUnderstood:
        fix(a, MISFIT)
        fix(b, MISFIT)


def _cut(axis: Axis, size: int, kind: Kind) -> tuple[Axis, Axis]:
    """Cut a leaf in two: a product with `size` slower entries, or the first `size` entries and the rest."""
    if axis.kind != "leaf" or (kind == "product" and axis.size % size):
        raise NotUnderstood
    rest = axis.size // size if kind == "product" else axis.size - size
    parts = Axis(size), Axis(rest)
    axis.become(Axis(axis.size, None, kind, parts))
    return parts


def regroup(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """The axes of a tensor after a reshape."""
    factors: list[Axis] = []
    for axis in map(Axis.resolve, axes):
        factors += axis.parts if axis.kind == "product" else [axis] if axis.size != 1 else []
    regrouped = []
    for size in shape:
        taken: list[Axis] = []
        while (missing := size // prod(part.size for part in taken)) > 1:
            if not factors:
                raise NotUnderstood
            part = factors.pop(0).resolve()
            if missing % part.size:
                part, rest = _cut(part, missing, "product")
                factors.insert(0, rest)
            taken.append(part)
        regrouped.append(product(taken) if taken else Axis(size))
    return regrouped


def stretch_of(axis: Axis, start: int, stop: int) -> Axis:
    """The axis of the entries from `start` up to `stop`."""
    axis = axis.resolve()
    if (start, stop) == (0, axis.size):
        return axis
    if axis.kind == "leaf":
        middle = Axis(stop - start)
        axis.become(concatenation([Axis(start), middle, Axis(axis.size - stop)]))
        return middle.resolve()
    if axis.kind == "product":
        first, rest = axis.parts[0], product(axis.parts[1:])
        if start % rest.size or stop % rest.size:
            raise NotUnderstood
        return product([stretch_of(first, start // rest.size, stop // rest.size), rest])
    covered, offset = [], 0
    for part in axis.parts:
        low, high = max(start - offset, 0), min(stop - offset, part.size)
        offset += part.size
        if low < high:
            covered.append(stretch_of(part, low, high))
    return concatenation(covered)


def order_of(axis: Axis, orders: Mapping[Axis, Tensor]) -> Tensor:
    """(size,): the entry at each place once each leaf is in its order; a leaf without an order stays as it is."""
    axis = axis.resolve()
    if axis.kind == "leaf":
        return orders[axis] if axis in orders else torch.arange(axis.size)
    if axis.kind == "concatenation":
        offsets = [0, *itertools.accumulate(part.size for part in axis.parts)]
        return torch.cat([order_of(part, orders) + k for part, k in zip(axis.parts, offsets, strict=False)])
    whole = torch.zeros(1, dtype=torch.long)
    for part in axis.parts:
        whole = (whole[:, None] * part.size + order_of(part, orders)).flatten()
    return whole


def places_of(axis: Axis, leaf: Axis) -> list[Tensor]:
    """For each time a leaf occurs in an axis, (leaf.size, k): the entries that belong to each entry of the leaf."""
    axis = axis.resolve()
    if axis is leaf:
        return [torch.arange(axis.size)[:, None]]
    occurrences: list[Tensor] = []
    if axis.kind == "concatenation":
        offset = 0
        for part in axis.parts:
            occurrences += [places + offset for places in places_of(part, leaf)]
            offset += part.size
    elif axis.kind == "product":
        everything = torch.arange(axis.size).view([part.size for part in axis.parts])
        for i, part in enumerate(axis.parts):
            along = everything.movedim(i, 0).flatten(1)
            occurrences += [along[places].flatten(1) for places in places_of(part, leaf)]
    return occurrences


def repeated(axis: Axis) -> set[Axis]:
    """Leaves that are more than one factor of an axis, whose order does not move whole slices of it."""
    axis = axis.resolve()
    if axis.kind == "leaf":
        return set()
    twice = set().union(*map(repeated, axis.parts))
    if axis.kind == "product":
        for first, second in itertools.combinations(axis.parts, 2):
            twice |= set(leaves(first)) & set(leaves(second))
    return twice


# Reading one forward

PLACE = "positions keep their order"
CONSTANT = "a constant of the forward"
INPUT = "the model's input"
OUTPUT = "the model's output"
ORDINARY = frozenset({PLACE, CONSTANT, INPUT, OUTPUT})  # not reported: such axes have only one order
UNUSED = "not used in the forward"
REPEATED = "one axis is a factor of another twice"


@dataclass(frozen=True)
class WeightAxes:
    """The axes of every parameter and buffer, and the groups of axes that share a permutation."""

    of: dict[str, tuple[Axis, ...]]  # by the tensor's first name; scalars are left out
    groups: dict[str, Axis]  # leaves that may be permuted, in execution order; named after the first axis with them
    fixed: dict[str, str]  # axes of parameters that keep their order because an operation is not understood


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers with axes, each once, under its first name."""
    return {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.ndim}


def weight_axes(model: nn.Module, *inputs: Any) -> WeightAxes:
    """Run the model once on these inputs, in eval mode, and read from it which axes of weights belong together.

    Axes of the input and of the output keep their order. So do axes that meet an operation which is not understood;
    `fixed` names it. Symmetries that do not move whole axes are left out: entries within heads of attention or groups
    of a convolution are permuted alike in all of them.
    """
    weights = named_weights(model)
    with kept_attributes(model), as_found(model), attention_in_parts, ModuleTracker() as modules:
        reader = _Reader(modules)
        for tensor in weights.values():
            reader.set(tensor, [Axis(size) for size in tensor.shape])
        for tensor in tensors_in(inputs):
            reader.set(tensor, [Axis(size, INPUT) for size in tensor.shape])
        with reader:
            outputs = model(*inputs)
    for tensor in tensors_in(outputs):
        for axis in reader.axes(tensor):
            fix(axis, OUTPUT)
    of = {name: tuple(reader.axes(tensor)) for name, tensor in weights.items()}
    for name, axes in of.items():
        for axis in axes:
            if id(weights[name]) not in reader.order:
                fix(axis, UNUSED)
            for leaf in repeated(axis):
                fix(leaf, REPEATED)
    groups: dict[Axis, str] = {}
    fixed: dict[str, str] = {}
    parameters = {name for name, _ in model.named_parameters()}
    for name in sorted(of, key=lambda name: reader.order.get(id(weights[name]), len(reader.order))):
        for i, axis in enumerate(of[name]):
            label, inside = f"{name}[{i}]", leaves(axis)
            for leaf in inside:
                if leaf.reason is None and leaf.size > 1:
                    again = sum(other.partition("#")[0] == label for other in groups.values())
                    groups.setdefault(leaf, f"{label}#{again + 1}" if again else label)
            reasons = [leaf.reason for leaf in inside if leaf.reason is not None and leaf.reason not in ORDINARY]
            if reasons and axis.size > 1 and name in parameters:
                fixed[label] = reasons[0]
    return WeightAxes(of, {name: axis for axis, name in groups.items()}, fixed)


class _Reader(OperationMode):
    """Record the axes of every tensor in a forward, operation by operation.

    The tensors are kept too, so that no two of them have the same id.
    """

    def __init__(self, modules: ModuleTracker) -> None:
        super().__init__()
        self._modules = modules  # that are being called
        self._axes: dict[int, list[Axis]] = {}
        self._held: dict[int, list[Tensor]] = {}  # by storage
        self.order: dict[int, int] = {}  # of tensors, by first use

    def axes(self, tensor: Tensor) -> list[Axis]:
        if id(tensor) not in self._axes:  # made outside the forward, and not a parameter or buffer
            self.set(tensor, [Axis(size, CONSTANT) for size in tensor.shape])
        return self._axes[id(tensor)]

    def set(self, tensor: Tensor, axes: Sequence[Axis]) -> None:
        if [axis.size for axis in axes] != list(tensor.shape):
            raise NotUnderstood
        if id(tensor) not in self._axes:
            self._held.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self._axes[id(tensor)] = list(axes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inside = max(self._modules.parents - {"Global"}, key=len, default="")  # such as Net.layers.0
        call = Call(self, func, args, kwargs or {}, output, inside.partition(".")[2])
        for tensor in call.tensors:
            self.order.setdefault(id(tensor), len(self.order))
        rule = next((rule for names, rule in AXIS_RULES.items() if re.fullmatch(names, call.name)), None)
        rule = _entry_by_entry if call.pointwise else rule
        others = self._sharing(call) if call.in_place and (rule is None or len(call.tensors) > 1) else []
        for axis in others:
            fix(axis, str(call))
        try:
            if rule is None or others or not call.outputs:
                raise NotUnderstood
            first = rule(call)
            self.set(call.outputs[0], first)
            for more in call.outputs[1:]:  # indices beside what was pooled, sums kept for a gradient
                if id(more) not in self._axes:
                    alike = more.shape == call.outputs[0].shape
                    self.set(more, first if alike else [Axis(size, str(call)) for size in more.shape])
        except NotUnderstood:
            for axis in [axis for tensor in call.tensors for axis in self.axes(tensor)]:
                fix(axis, str(call))
            for tensor in call.outputs:
                self.set(tensor, [Axis(size, str(call)) for size in tensor.shape])
        return output

    def _sharing(self, call: Call) -> list[Axis]:
        """The axes of other tensors on the same memory, which an operation in place changes too."""
        axes: list[Axis] = []
        for output in call.outputs:
            expected = [axis.resolve() for axis in self.axes(output)]
            for other in self._held[output.untyped_storage()._cdata]:
                if [axis.resolve() for axis in self.axes(other)] != expected:
                    axes += self.axes(other)
        return axes


class Call(Operation):
    """An operation with its outputs, and the axes of its tensors."""

    def __init__(
        self, reader: _Reader, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any, where: str
    ) -> None:
        super().__init__(func, args, kwargs)  # add_ has the name, and so the rule, of add
        self.overload, self.outputs = func._overloadname, tensors_in(output)
        self.shape = self.outputs[0].shape if self.outputs else ()
        self.in_place = bool(func._schema.is_mutable) and any(o is t for o in self.outputs for t in self.tensors)
        self.reader, self._where = reader, where

    def axes(self, which: int | str = 0) -> list[Axis]:
        """The axes of a tensor, by its number among the tensors or by the name of the argument."""
        return self.reader.axes(self.tensors[which] if isinstance(which, int) else self.arguments[which])

    def __str__(self) -> str:
        return f"{self.name} in {self._where or 'the model itself'}"


# The rule of each operation for the axes of its tensors

AxisRule = Callable[[Call], list[Axis]]  # the axes of the (first) output
AXIS_RULES: dict[str, AxisRule] = {}  # by a pattern of the operation's name


def axis_rule(names: str) -> Callable[[AxisRule], AxisRule]:
    """Register the rule of operations whose names match."""

    def register(function: AxisRule) -> AxisRule:
        AXIS_RULES[names] = function
        return function

    return register


@axis_rule("native_layer_norm")
def _entry_by_entry(call: Call) -> list[Axis]:
    """All tensors are broadcast: axes at the same place are the same."""
    shape = call.tensors[0].shape if call.name == "stack" else call.shape
    met: list[Axis | None] = [None] * len(shape)
    for k in range(len(call.tensors)):
        for i, axis in enumerate(reversed(call.axes(k)), 1):
            if i > len(shape) or axis.size not in (1, shape[-i]):
                raise NotUnderstood
            if axis.size == 1:
                continue
            if (before := met[-i]) is not None:
                unite(before, axis)
            met[-i] = axis
    return [Axis(size) if axis is None else axis.resolve() for axis, size in zip(met, shape, strict=True)]


@axis_rule("_softmax|_log_softmax|_safe_softmax|_to_copy|detach|alias|lift_fresh|contiguous")
def _same(call: Call) -> list[Axis]:
    return call.axes()


@axis_rule("(new_)?(zeros|ones|full|empty|empty_strided)(_like)?|scalar_tensor")
def _uniform(call: Call) -> list[Axis]:
    # Equal entries look the same in any order.
    return [Axis(size) for size in call.shape]


@axis_rule("mean|sum|amax|amin|var|std|prod|logsumexp|linalg_vector_norm|any|all")
def _reduction(call: Call) -> list[Axis]:
    axes, dim = call.axes(), call["dim"]
    if dim is None or dim == []:
        dim = range(len(axes))
    dims = {d % len(axes) for d in ([dim] if isinstance(dim, int) else dim)}
    if call["keepdim"]:
        return [Axis(1) if i in dims else axis for i, axis in enumerate(axes)]
    return [axis for i, axis in enumerate(axes) if i not in dims]


@axis_rule(r"(_?adaptive_)?(avg|max)_pool[123]d.*|_?upsample_\w+[123]d.*|\w+_pad[123]d")
def _over_places(call: Call) -> list[Axis]:
    axes, count = call.axes(), int(re.findall(r"([123])d", call.name)[0])
    for axis in axes[-count:]:
        fix(axis, PLACE)
    return axes[:-count] + [Axis(size, PLACE) for size in call.shape[-count:]]


@axis_rule("convolution")
def _convolution(call: Call) -> list[Axis]:
    images, weight, groups = call.axes("input"), call.axes("weight"), call["groups"]
    for axis in (*images[2:], *weight[2:]):
        fix(axis, PLACE)
    if groups == 1:
        before, channels = weight[:2] if call["transposed"] else weight[1::-1]
        unite(images[1], before)
    else:
        # Groups may be permuted, and entries alike within all groups: not every symmetry, but whole axes.
        outer, within = weight[:2]
        slow, fast = Axis(groups), Axis(outer.size // groups)
        unite(outer, product([slow, fast]))
        ins, outs = (fast, within) if call["transposed"] else (within, fast)
        unite(images[1], product([slow, ins]))
        channels = product([slow, outs])
    if call["bias"] is not None:
        unite(call.axes("bias")[0], channels)
    return [images[0], channels.resolve(), *(Axis(size, PLACE) for size in call.shape[2:])]


@axis_rule("_?(native|cudnn|miopen)?_?batch_norm.*")
def _batch_norm(call: Call) -> list[Axis]:
    axes = call.axes()
    for k, tensor in enumerate(call.tensors[1:], 1):
        if tensor.shape == (axes[1].size,):
            unite(axes[1], call.axes(k)[0])
        elif tensor.numel():
            raise NotUnderstood
    return axes


@axis_rule("native_group_norm")
def _group_norm(call: Call) -> list[Axis]:
    axes, groups = call.axes("input"), call["group"]
    unite(axes[1], product([Axis(groups), Axis(axes[1].size // groups)]))
    for k in range(1, len(call.tensors)):
        unite(axes[1], call.axes(k)[0])
    return axes


@axis_rule("linear")
def _linear(call: Call) -> list[Axis]:
    x, weight = call.axes("input"), call.axes("weight")
    unite(x[-1], weight[1])
    return _plus([*x[:-1], weight[0]], [] if call["bias"] is None else call.axes("bias"))


@axis_rule("mm|addmm|bmm|baddbmm|mv|addmv|dot")
def _matrix_product(call: Call) -> list[Axis]:
    x, y = call.axes(-2), call.axes(-1)
    batch = len(x) - 2 if len(x) == len(y) else 0
    for axes in zip(x[:batch], y[:batch], strict=True):
        unite(*axes)
    unite(x[-1], y[-2] if len(y) > 1 else y[-1])
    return _plus([*x[:-1], *(y[-1:] if len(y) > 1 else [])], call.axes(0) if len(call.tensors) == 3 else [])


def _plus(axes: list[Axis], added: Sequence[Axis]) -> list[Axis]:
    """Unite these axes with those of an added term, which may be broadcast."""
    for axis, other in zip(reversed(axes), reversed(added), strict=False):
        if other.size != 1:
            unite(axis, other)
    return axes


@axis_rule(r"_scaled_dot_product_\w+")
def _attention(call: Call) -> list[Axis]:
    query, key, value = (call.axes(name) for name in ("query", "key", "value"))
    for a, b in (*zip(query[:-2], key[:-2], strict=True), *zip(key[:-2], value[:-2], strict=True)):
        if a.size != b.size:
            raise NotUnderstood
        unite(a, b)
    unite(query[-1], key[-1])
    unite(key[-2], value[-2])
    if len(call.tensors) > 3 or call["is_causal"]:
        masks = [axis for k in range(3, len(call.tensors)) for axis in call.axes(k)]
        for axis in (query[-2], key[-2], *masks):
            fix(axis, PLACE)
    return [*query[:-1], value[-1]]


@axis_rule("embedding")
def _embedding(call: Call) -> list[Axis]:
    weight = call.axes("weight")
    fix(weight[0], INPUT)
    return [*call.axes("indices"), weight[1]]


@axis_rule("view|_unsafe_view|reshape|unsqueeze|squeeze|_reshape_alias")
def _view(call: Call) -> list[Axis]:
    if call.overload == "dtype":
        raise NotUnderstood
    return regroup(call.axes(), call.shape)


@axis_rule("t|transpose|permute")
def _permute(call: Call) -> list[Axis]:
    axes = list(call.axes())
    if call.name == "permute":
        return [axes[dim] for dim in call["dims"]]
    first, second = (0, -1) if call.name == "t" else (call["dim0"], call["dim1"])
    if axes:
        axes[first], axes[second] = axes[second], axes[first]
    return axes


@axis_rule("expand")
def _expand(call: Call) -> list[Axis]:
    axes = call.axes()
    padded = [Axis(1)] * (len(call.shape) - len(axes)) + axes
    return [axis if axis.size == size else Axis(size) for axis, size in zip(padded, call.shape, strict=True)]


@axis_rule("select")
def _select(call: Call) -> list[Axis]:
    axes = list(call.axes())
    fix(axes.pop(call["dim"]), PLACE)
    return axes


@axis_rule("slice")
def _slice(call: Call) -> list[Axis]:
    axes, dim = list(call.axes()), call["dim"]
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(axes[dim].size)
    if step != 1:
        fix(axes[dim], str(call))
        axes[dim] = Axis(call.shape[dim], leaves(axes[dim])[0].reason)
    else:
        axes[dim] = _piece(axes[dim], start, max(start, stop))
    return axes


@axis_rule("split|split_with_sizes|unsafe_split")
def _split(call: Call) -> list[Axis]:
    axes, dim, stops = call.axes(), call["dim"], [0]
    for output in call.outputs:
        stops.append(stops[-1] + output.shape[dim])
    pieces = [_piece(axes[dim], start, stop) for start, stop in itertools.pairwise(stops)]
    for output, piece in zip(call.outputs, pieces, strict=True):
        whole = list(axes)
        whole[dim] = piece
        call.reader.set(output, whole)
    return call.reader.axes(call.outputs[0])


def _piece(axis: Axis, start: int, stop: int) -> Axis:
    reasons = [part.reason for part in leaves(axis)]
    return stretch_of(axis, start, stop) if None in reasons else Axis(stop - start, reasons[0])


@axis_rule("cat")
def _concatenate(call: Call) -> list[Axis]:
    parts = [call.axes(k) for k, tensor in enumerate(call.tensors) if tensor.shape != (0,)]
    dim = call["dim"] % len(parts[0])
    for part in parts[1:]:
        for i, axis in enumerate(part):
            if i != dim:
                unite(parts[0][i], axis)
    whole = list(parts[0])
    whole[dim] = concatenation([part[dim] for part in parts])
    return whole


@axis_rule("stack")
def _stack(call: Call) -> list[Axis]:
    axes = _entry_by_entry(call)
    axes.insert(call["dim"] % (len(axes) + 1), Axis(len(call.tensors), PLACE))
    return axes


@axis_rule("constant_pad_nd")
def _pad(call: Call) -> list[Axis]:
    axes, pad = list(call.axes()), call["pad"]
    if min(pad) < 0:
        raise NotUnderstood
    for i in range(len(pad) // 2):
        low, high = pad[2 * i : 2 * i + 2]
        dim = len(axes) - 1 - i
        if low + high:
            # All padding is equal, so it has no order.
            axes[dim] = concatenation([Axis(low), axes[dim], Axis(high)])
    return axes
