"""How each operation acts on linear parts: linear ones as they are, activations not at all, the rest is named."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .part import CLAIMED, LinearPart, NotLinear, place, to_exponent
from .rules import RULES, Arguments, constant


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Element by element, and taken away: each counts as the identity.
ACTIVATIONS = _words(
    "relu relu6 leaky_relu gelu silu sigmoid tanh elu celu selu hardtanh hardswish hardsigmoid softplus mish "
    "_prelu_kernel prelu rrelu_with_noise threshold clamp clamp_min clamp_max log_sigmoid softshrink hardshrink"
)
# Linear in one tensor, and without a constant of their own: they act on the part as they act on the whole.
STRUCTURE = _words(
    "view _unsafe_view reshape _reshape_alias _reshape_copy permute transpose t expand squeeze unsqueeze slice select "
    "clone alias detach contiguous unfold im2col col2im as_strided narrow split split_with_sizes unsafe_split "
    "unsafe_chunk unbind index_select index gather reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d roll flip rot90 repeat mean sum avg_pool1d avg_pool2d "
    "avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d pixel_shuffle pixel_unshuffle channel_shuffle cumsum "
    "neg diagonal tril triu lift_fresh movedim swapaxes"
)
# Constants that take only their shape from an activation.
SHAPES = _words("ones_like full_like rand_like randn_like new_ones new_full")
# Tensors made to be written into: nothing of them depends on the input yet.
BLANK = _words("zeros_like new_zeros empty_like new_empty new_empty_strided")
READS = _words("_local_scalar_dense item equal is_nonzero")


def follow(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation makes of linear parts."""
    first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LinearPart))
    claimed = kwargs.get("dtype") or (first.dtype if first.dtype.is_floating_point else CLAIMED.get())
    token = CLAIMED.set(claimed)
    try:
        return _follow(func._schema.name.removeprefix("aten::"), func, args, kwargs)
    finally:
        CLAIMED.reset(token)


def _follow(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if name in READS:
        raise NotLinear(f"{place()} decides by what it computes ({name.strip('_')}), which no linear map does")
    given = _named(func, args, kwargs)
    written = next((argument.name for argument in func._schema.arguments if _is_written(argument)), None)
    if written is None:
        return _result(name, func, args, kwargs, given)
    target = given[written]
    if not isinstance(target, LinearPart):
        raise NotLinear(
            f"{place()} writes what depends on the input into a tensor that does not ({name}): pad, or concatenate"
        )
    return _write(target, _result(name.removesuffix("_"), func, args, kwargs, given, overwrites=True), name)


def _result(name: str, func: Any, args: Any, kwargs: Any, given: Arguments, *, overwrites: bool = False) -> Any:
    parts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LinearPart)]
    reason = next((part.broken for part in parts if part.broken is not None), None)
    if reason is None:
        if name in ACTIVATIONS:
            return parts[0]
        if name in RULES:
            found = RULES[name](given)
            if not isinstance(found, str):
                return found
            reason = f"{found} in {place()}"
        elif name in SHAPES:
            return tree_map(_as_claimed, func(*_inner(args), **_inner(kwargs)))
        elif name in BLANK:
            blank = func(*_inner(args), **_inner(kwargs))
            return LinearPart(blank.double().zero_()) if blank.is_floating_point() else blank
        elif name in STRUCTURE and len(parts) == 1 and not overwrites:
            options = {key: value for key, value in kwargs.items() if key != "dtype"}
            return _wrapped(func(*_inner(args), **_inner(options)), parts[0].exponent, None)
        else:
            reason = f"{name.strip('_')} in {place()}"
    if overwrites:
        return reason
    try:
        # Only for its shape and type: whoever wants to read it is told why there is nothing to read.
        return _wrapped(func(*_inner(args), **_inner(kwargs)), 0, reason)
    except Exception as error:
        raise NotLinear(f"{reason}: no linear map, and it does not take float64 numbers ({error})") from error


def _write(target: LinearPart, found: Any, name: str) -> LinearPart:
    """In place: what shares the target's memory changes too."""
    reason = found if isinstance(found, str) else found.broken
    if reason is not None:
        if target.part._is_view():
            raise NotLinear(f"{reason}: no linear map, and it changes a part of a tensor in place")
        target.broken = reason
    elif found is not target:
        target.part.copy_(to_exponent(found, target.exponent))
    return target


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _named(func: Any, args: Any, kwargs: Any) -> Arguments:
    found = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    found |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    return found | kwargs


def _inner(tree: Any) -> Any:
    return tree_map(_unwrapped, tree)


def _unwrapped(leaf: Any) -> Any:
    if isinstance(leaf, LinearPart):
        return leaf.part
    return constant(leaf) if isinstance(leaf, Tensor) else leaf


def _as_claimed(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(CLAIMED.get()) if floating else leaf


def _wrapped(tree: Any, exponent: int, reason: str | None) -> Any:
    return tree_map(lambda leaf: LinearPart(leaf, exponent, reason) if isinstance(leaf, Tensor) else leaf, tree)
