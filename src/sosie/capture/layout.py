"""Where the features of an activation are: in the last dimension (tokens) or the second (feature maps)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

from ..process_state import OperationMode

if TYPE_CHECKING:
    from .sites import Names


class FeatureAxes(OperationMode):
    """Follow through a forward which axes of each tensor hold features.

    A layer's weights determine the axis of its output: the second for convolutions and for norms of maps, the last for
    the rest. Every other operation keeps, moves, splits or joins axes. Nothing is known where operations disagree, as a
    norm of tokens after a layer of features does, or where none gives evidence.
    """

    supports_higher_order_operators = True  # run like any other operation; torch refuses them by default

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that what is always compiled (flex_attention) stays compiled

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()  # tensor -> list[_Axis], if any of them holds features
        self._weights = WeakTensorKeyDictionary()  # tensors made of parameters alone

    def channels_last(self, tensor: Tensor) -> bool | None:
        """Return whether the last dimension holds the features, or else the second; None if unknown.

        In an activation of two dimensions the second is both.
        """
        if tensor.ndim <= 2:
            return True
        feature_axes = [i for i, axis in enumerate(self._known.get(tensor, [])) if i and axis.size > 1 and axis.whole]
        if feature_axes == [tensor.ndim - 1]:
            return True
        return False if feature_axes == [1] else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if _is_composite(func):  # inference mode passes these on whole; their parts need no rules of their own
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        output = func(*args, **kwargs)
        self._read(Operation(func, args, kwargs), _tensors([output]))
        return output

    def _read(self, call: Operation, outputs: list[Tensor]) -> None:
        if call.tensors and all(isinstance(tensor, nn.Parameter) or tensor in self._weights for tensor in call.tensors):
            for output in outputs:
                self._weights[output] = True
            return
        for k, output in enumerate(outputs):
            axes = None
            if k == 0 or call.name in _SPLITS:  # other outputs are indices, or sums for a gradient
                # If an operation takes a form that its rule does not cover, the forward goes on and nothing is known.
                with suppress(IndexError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError):
                    axes = self._axes(call, output)
            if axes is not None and any(axis.holds_any for axis in axes):
                self._known[output] = axes
            else:
                self._known.pop(output, None)

    def _axes(self, call: Operation, output: Tensor) -> list[_Axis] | None:
        """Return the axes of an operation's output, or None if nothing is known."""
        shape, name = list(output.shape), call.name
        if _CONVOLUTION.fullmatch(name):
            return _one(shape, 1)
        if _NORM.fullmatch(name):
            return self._normed(call, shape, 1)
        if name == "native_layer_norm":
            several = len(call["normalized_shape"]) > 1
            return self._same_rank(call, shape) if several else self._normed(call, shape, len(shape) - 1)
        if _LAST.fullmatch(name):
            return _one(shape, -1)
        if name in _PRODUCTS:
            return self._product(call, shape)
        if "scaled_dot_product" in name:
            value = self._known.get(call["value"])
            return None if value is None else _resized(value, shape)
        if call.pointwise:
            return self._pointwise(call, shape)
        axes = self._known.get(call.tensors[0]) if call.tensors else None
        if name in _MOVES:
            return None if axes is None else _moved(call, axes, shape)
        return self._same_rank(call, shape)

    def _normed(self, call: Operation, shape: list[int], at: int) -> list[_Axis] | None:
        """Return the axes after a norm of one axis, which marks it as features; None if a layer marked another one."""
        before = self._known.get(call.tensors[0])
        if before is not None and not before[at].holds_any:
            return None
        # A norm of instances flattens the inputs into its channels and keeps the shape.
        return _one(shape, at) if before is None or before[at].whole or at > 1 else _resized(before, shape)

    def _product(self, call: Operation, shape: list[int]) -> list[_Axis] | None:
        x, y = call.tensors[-2:]
        left, right = self._known.get(x), self._known.get(y)
        if isinstance(y, nn.Parameter) or y in self._weights:
            # A layer that mixes tokens has units in one axis and features in another: keep both.
            return [*([_Axis.of(size) for size in shape] if left is None else left)[:-1], *_one(shape[-1:], -1)]
        if right is not None and right[-1].whole and y.ndim > 1:
            # Heads of attention are features too; they come with the values.
            return [*right[:-2], *([] if x.ndim < 2 else [_Axis.of(shape[-2])]), right[-1]]
        if left is not None and not left[-1].holds_any:
            return [*left[:-1], *([] if y.ndim < 2 else [_Axis.of(shape[-1])])]
            # A product with a constant keeps features; one of two activations, as of queries and keys, leaves none.
        return _one(shape, -1) if left is not None and right is None else None

    def _pointwise(self, call: Operation, shape: list[int]) -> list[_Axis] | None:
        known = self._known_axes(call)
        whole = [axes for axes in known if [axis.size for axis in axes] == shape]
        if whole:
            shared = set.intersection(*map(_holding, whole))
            return [axis if i in shared else _Axis.of(axis.size) for i, axis in enumerate(whole[0])]
        result = [_Axis.of(size) for size in shape]
        for axes in known:
            for i, axis in enumerate(reversed(axes), 1):
                if axis.size == shape[-i] and axis.holds_any:
                    result[-i] = axis
        return result

    def _same_rank(self, call: Operation, shape: list[int]) -> list[_Axis] | None:
        """Return the axes after an operation that keeps their order; it may change their sizes."""
        candidates = [axes for axes in self._known_axes(call) if len(axes) == len(shape)]
        if call.name not in _RESIZES:
            candidates = [axes for axes in candidates if all(axes[i].size == shape[i] for i in _holding(axes))]
        if not candidates or any(_holding(axes) != _holding(candidates[0]) for axes in candidates):
            return None
        return _resized(candidates[0], shape)

    def _known_axes(self, call: Operation) -> list[list[_Axis]]:
        return [axes for tensor in call.tensors if (axes := self._known.get(tensor)) is not None]


class _Axis(NamedTuple):
    """An axis as the axes flattened into it, the last running fastest: the size of each and whether it has features."""

    parts: tuple[tuple[int, bool], ...]

    @classmethod
    def of(cls, size: int, features: bool = False) -> _Axis:
        return cls(((size, features),))

    @property
    def size(self) -> int:
        return prod(size for size, _ in self.parts)

    @property
    def whole(self) -> bool:
        """Whether the axis holds nothing but features."""
        return all(features for size, features in self.parts if size > 1)

    @property
    def holds_any(self) -> bool:
        return any(features for _, features in self.parts)


class Operation:
    """An operation of a forward with its arguments by name and the tensors among them."""

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        schema = func._schema.arguments
        self.name = func.overloadpacket.__name__.rstrip("_")
        self.pointwise = torch.Tag.pointwise in func.tags or self.name in POINTWISE
        given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        self.arguments: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()} | given
        self.tensors = _tensors(self.arguments.values())

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@cache
def _is_composite(func: OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE))


_CONVOLUTION = re.compile(r"\w*(convolution|conv\dd)\w*")
_NORM = re.compile(r"\w*(batch_norm|group_norm)\w*")  # of the second axis
_LAST = re.compile(r"_?embedding\w*|linear\w*|_trilinear|\w*(rnn|lstm|gru)\w*")
POINTWISE = {  # not tagged so
    *("_prelu_kernel", "hardswish", "copy", "native_dropout", "dropout"),
    *("leaky_relu", "elu", "hardtanh", "mish", "softplus", "hardsigmoid"),  # by torch 2.4
}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "var", "std", "prod", "logsumexp", "linalg_vector_norm", "max", "min"}
_MOVES = (
    _VIEWS | _REDUCTIONS | {"permute", "transpose", "t", "unsqueeze", "squeeze", "select", "unbind", "stack", "expand"}
)
_SPLITS = {"split", "split_with_sizes", "unsafe_split", "unbind"}
_RESIZES = {"slice", *_SPLITS, "cat", "constant_pad_nd", "pixel_shuffle", "pixel_unshuffle"}


def _moved(call: Operation, axes: list[_Axis], shape: list[int]) -> list[_Axis] | None:
    """Return the axes after an operation that removes some, adds some or changes their order."""
    n, name = len(axes), call.name
    if name in _VIEWS:
        return _regrouped(axes, shape)
    if name == "permute":
        return [axes[dim] for dim in call["dims"]]
    if name in ("t", "transpose"):
        first, second = (0, n - 1) if name == "t" else (call["dim0"] % n, call["dim1"] % n)
        order = {first: second, second: first}
        return [axes[order.get(i, i)] for i in range(n)]
    if name == "expand":
        return _resized([*[_Axis.of(1)] * (len(shape) - n), *axes], shape)
    if name in ("unsqueeze", "stack"):
        new = call["dim"] % (n + 1)
        return [*axes[:new], _Axis.of(shape[new]), *axes[new:]]
    if name == "squeeze" and "dim" not in call.arguments:
        return [axis for axis in axes if axis.size != 1]
    dim = call.arguments.get("dim")
    dims = set(range(n)) if dim in (None, []) else {d % n for d in (dim if isinstance(dim, list) else [dim])}
    if name == "squeeze":
        dims = {d for d in dims if axes[d].size == 1}
    if call.arguments.get("keepdim"):
        return [_Axis.of(1) if i in dims else axis for i, axis in enumerate(axes)]
    return [axis for i, axis in enumerate(axes) if i not in dims]


def _regrouped(axes: list[_Axis], shape: list[int]) -> list[_Axis] | None:
    """Return the axes of a tensor after a change of shape; None if they would be split where that does not fit."""
    parts: list[tuple[int, bool]] = []
    for size, features in (part for axis in axes for part in axis.parts):
        if parts and (size == 1 or parts[-1][1] == features):  # neighbours of one kind may be split anywhere
            parts[-1] = (parts[-1][0] * size, parts[-1][1])
        else:
            parts.append((size, features))
    parts = [part for part in parts if part[0] != 1]
    result = []
    for size in shape:
        taken: list[tuple[int, bool]] = []
        while (missing := size // prod(part_size for part_size, _ in taken)) > 1:
            if not parts:
                return None
            (part_size, features), *parts = parts
            if missing % part_size:
                if part_size % missing:
                    return None
                parts = [(part_size // missing, features), *parts]
                part_size = missing
            taken.append((part_size, features))
        result.append(_Axis(tuple(taken)) if taken else _Axis.of(size))
    return result


def _resized(axes: list[_Axis], shape: list[int]) -> list[_Axis]:
    return [
        axis if axis.size == size else _Axis.of(size, axis.whole and axis.holds_any)
        for axis, size in zip(axes, shape, strict=True)
    ]


def _one(shape: list[int], features: int) -> list[_Axis]:
    """Return axes of which one holds features."""
    return [_Axis.of(size, i == features % len(shape)) for i, size in enumerate(shape)]


def _holding(axes: list[_Axis]) -> set[int]:
    return {i for i, axis in enumerate(axes) if axis.holds_any}


def _tensors(parts: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments or outputs: alone or in lists, never deeper."""
    flat = (item for part in parts for item in (part if isinstance(part, (list, tuple)) else (part,)))
    return [item for item in flat if isinstance(item, Tensor)]


_Layout = tuple[bool, int | None]  # whether the last dimension holds the features, and their number if known


def layout_by_class(names: Names, name: str, shape: tuple[int, ...]) -> bool | None:
    """Return whether the last dimension of an output of this shape, batch included, holds the features, or None.

    Used for hooks that are compiled with the model, where operations cannot be followed. Most layers reveal it by their
    class. An activation function is read like the layer registered before it, a block like the layers inside it, both
    only if the widths fit one way.
    """
    if len(shape) <= 2:
        return True
    module = names.by_name[name]
    layout = _layout(module)
    if layout is not None:
        return layout[0]
    if names.is_leaf(name) and not type(module).__module__.startswith("torch.nn."):
        return None  # it may permute
    if names.is_leaf(name):
        order = list(names.by_name)
        before = (_layout(names.by_name[other]) for other in reversed(order[: order.index(name)]))
        layouts = [next((layout for layout in before if layout is not None), None)]
    else:
        start = f"{name}." if name else ""
        layouts = [_layout(module) for below, module in names.by_name.items() if below.startswith(start)]
    known = [layout for layout in layouts if layout is not None]
    last = any(at_the_end and width == shape[-1] for at_the_end, width in known)
    second = any(not at_the_end and width in (None, shape[1]) for at_the_end, width in known)
    return last if last != second else None


def _layout(module: nn.Module) -> _Layout | None:
    """Return what a layer's class reveals about its output; None for layers that keep their input's layout."""
    match module:
        case nn.Linear() | nn.Bilinear():
            return True, module.out_features
        case nn.Embedding() | nn.EmbeddingBag():
            return True, module.embedding_dim
        case nn.MultiheadAttention():
            return True, module.embed_dim
        case nn.RNNBase():
            return True, (module.proj_size or module.hidden_size) * (1 + module.bidirectional)
        case nn.LayerNorm() | nn.RMSNorm():
            # Vision nets subclass LayerNorm to normalise NCHW maps: only its own forward keeps features last.
            plain = type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)
            return (True, module.normalized_shape[-1]) if plain else None
        case nn.modules.conv._ConvNd():
            return False, module.out_channels
        case nn.modules.batchnorm._NormBase():
            return False, module.num_features
        case nn.GroupNorm():
            return False, module.num_channels
    return (False, None) if isinstance(module, _CHANNELS_FIRST) else None


_CHANNELS_FIRST = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._LPPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.LocalResponseNorm,
    nn.Upsample,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
)
