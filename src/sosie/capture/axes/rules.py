"""What each operation of a forward says about the axes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import Tensor

from .algebra import Axis, concatenation, fix, leaf, leaves, product, regroup, stretch_of, unite
from .calls import INPUT, PLACE, Call, Known, NotUnderstood, broadcast

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
