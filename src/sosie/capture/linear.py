"""The linear part of an activation: a tensor that follows the network's own code, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _disabled_torch_function_impl
from torch.utils._pytree import tree_leaves, tree_map

from .sites import Names, Site, unwrap
from .watch import Watch, watch

FAR = 2.0**64  # numbers beyond this, or below its inverse, are brought back by a power of two

# Where in the model the code is: the modules that are being called, outermost first.
PLACES: ContextVar[tuple[str, ...]] = ContextVar("sosie_linear_places", default=())
# The type that linear parts claim to have: that of the model's weights, since operations refuse to mix types.
CLAIMED: ContextVar[torch.dtype] = ContextVar("sosie_linear_claimed", default=torch.float64)

# What was done to a model that is not plain linear algebra, in words.
NOTES: ContextVar[set[str] | None] = ContextVar("sosie_linear_notes", default=None)


class NotLinear(ValueError):
    """Something in the model does not become linear when its activation functions are removed."""


class LinearPart(Tensor):
    """`part` × 2 ** `exponent`: what of an activation is linear in the network's input, in float64.

    What is added to it (biases, means) vanishes by definition and not by subtraction, so that it costs no digits. The
    exponent keeps deep chains from overflowing. `broken` says why a value is no longer linear; it is an error only
    where somebody wants to read it.
    """

    part: Tensor
    exponent: int
    broken: str | None

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, part: Tensor, exponent: int = 0, broken: str | None = None) -> LinearPart:
        made: LinearPart = Tensor._make_wrapper_subclass(
            cls,
            part.shape,
            strides=part.stride(),
            storage_offset=part.storage_offset(),
            dtype=CLAIMED.get() if part.is_floating_point() else part.dtype,
            device=part.device,
            requires_grad=False,
        )
        made.part, made.exponent, made.broken = part, exponent, broken
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LinearPart({tuple(self.part.shape)}, 2**{self.exponent}{', broken' if self.broken else ''})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:

        return follow(func, args, kwargs or {})


def scaled(part: Tensor, exponent: int) -> LinearPart:
    """A linear part whose numbers are brought back where they leave the middle of what float64 holds."""
    largest = float(part.abs().max()) if part.numel() else 0.0
    if largest and math.isfinite(largest) and not 1 / FAR <= largest <= FAR:
        shift = math.frexp(largest)[1]
        # In two steps: 2 ** 1074 alone would not fit.
        half = shift // 2
        return LinearPart(part * 2.0**-half * 2.0 ** -(shift - half), exponent + shift)
    return LinearPart(part, exponent)


def aligned(parts: Sequence[LinearPart]) -> tuple[list[Tensor], int]:
    """The parts to one common exponent, the largest of theirs."""
    exponent = max(part.exponent for part in parts)
    return [part.part if part.exponent == exponent else to_exponent(part, exponent) for part in parts], exponent


def to_exponent(value: LinearPart, exponent: int) -> Tensor:
    """The numbers that stand for a value under another exponent."""
    shift = value.exponent - exponent
    if not shift:
        return value.part
    half = shift // 2
    low, high = -1022, 1022
    first, second = (2.0 ** min(max(s, low), high) for s in (half, shift - half))
    return value.part * first * second


def note(text: str) -> None:
    """Keep in mind what the result should say."""
    found = NOTES.get()
    if found is not None:
        found.add(text)


def place() -> str:
    """Where the code is, for a message."""
    places = PLACES.get()
    return places[-1] if places else "the model"


# Operations that mix constants with what depends on the input

aten = torch.ops.aten
Arguments = dict[str, Any]  # of an operation, by the names of its schema
Rule = Callable[[Arguments], Any]  # what it makes of linear parts; a text where that is not linear
RULES: dict[str, Rule] = {}

POOLED = "max pooling counts as mean pooling over the same windows"
TWO_FACTORS = "a product of two tensors that both depend on the input"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what operations of these names make of linear parts."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def constant(value: Any) -> Any:
    """A number or tensor that does not depend on the input, with all its digits."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _sum(*terms: tuple[Any, float]) -> LinearPart:
    """A sum of multiples; constants vanish, and leave only their shape."""
    shape = torch.broadcast_shapes(*(value.shape for value, _ in terms if isinstance(value, Tensor)))
    moving = [(value, factor) for value, factor in terms if isinstance(value, LinearPart)]
    parts, exponent = aligned([value for value, _ in moving])
    total: Tensor | None = None
    for part, (_, factor) in zip(parts, moving, strict=True):
        each = part if factor == 1 else part * factor
        total = each if total is None else total + each
    assert total is not None
    return LinearPart(total.expand(shape) if total.shape != shape else total, exponent)


@rule("add")
def _add(a: Arguments) -> Any:
    return _sum((a["self"], 1), (a["other"], a.get("alpha", 1)))


@rule("sub")
def _sub(a: Arguments) -> Any:
    return _sum((a["self"], 1), (a["other"], -a.get("alpha", 1)))


@rule("rsub")
def _rsub(a: Arguments) -> Any:
    return _sum((a["other"], 1), (a["self"], -a.get("alpha", 1)))


@rule("mul")
def _mul(a: Arguments) -> Any:
    x, y = a["self"], a["other"]
    if isinstance(x, LinearPart) and isinstance(y, LinearPart):
        return TWO_FACTORS
    moving, fixed = (x, y) if isinstance(x, LinearPart) else (y, x)
    return scaled(moving.part * constant(fixed), moving.exponent)


@rule("div")
def _div(a: Arguments) -> Any:
    if isinstance(a["other"], LinearPart):
        return "a division by something that depends on the input"
    if a.get("rounding_mode") is not None:
        return "a rounded division"
    return scaled(a["self"].part / constant(a["other"]), a["self"].exponent)


@rule("mm", "bmm", "mv", "dot", "matmul")
def _mm(a: Arguments) -> Any:
    x = a["self"]
    y = next(a[name] for name in ("mat2", "vec", "tensor", "other") if name in a)
    return _product(x, y)


def _product(x: Any, y: Any) -> LinearPart | str:
    if isinstance(x, LinearPart) and isinstance(y, LinearPart):
        return TWO_FACTORS
    if isinstance(x, LinearPart):
        return scaled(x.part @ constant(y), x.exponent)
    return scaled(constant(x) @ y.part, y.exponent)


@rule("addmm", "addbmm", "baddbmm", "addmv")
def _addmm(a: Arguments) -> Any:
    x = next(a[name] for name in ("mat1", "batch1", "mat") if name in a)
    y = next(a[name] for name in ("mat2", "batch2", "vec") if name in a)
    if "batch1" in a and a["self"].dim() == 2:
        return "a sum of products over a batch"
    if not isinstance(x, LinearPart) and not isinstance(y, LinearPart):
        rows = x.shape[:-1] + y.shape[y.dim() - 1 :] if y.dim() > 1 else x.shape[:-1]
        return _sum((a["self"], a.get("beta", 1)), (torch.empty(rows), 1))
    found = _product(x, y)
    if isinstance(found, str):
        return found
    return _sum((a["self"], a.get("beta", 1)), (found, a.get("alpha", 1)))


@rule("linear")
def _linear(a: Arguments) -> Any:
    if any(isinstance(a.get(name), LinearPart) for name in ("weight", "bias")):
        return "weights that depend on the input"
    return scaled(a["input"].part @ constant(a["weight"]).mT, a["input"].exponent)


@rule("convolution", "_convolution")
def _convolution(a: Arguments) -> Any:
    if not isinstance(a["input"], LinearPart) or isinstance(a["weight"], LinearPart):
        return "weights that depend on the input"
    settings = (a[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups"))
    found = aten.convolution(a["input"].part, constant(a["weight"]), None, *settings)
    return scaled(found, a["input"].exponent)


@rule(
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_no_update",
)  # fmt: skip
def _batch_norm(a: Arguments) -> Any:
    x, variance = a["input"], a.get("running_var")
    if variance is None or a.get("training", False) or not isinstance(x, LinearPart):
        return "batch norm by the statistics of the batch"
    factor = (constant(variance) + next(a[name] for name in ("eps", "epsilon") if name in a)).rsqrt()
    if a.get("weight") is not None:
        factor = factor * constant(a["weight"])
    found = scaled(x.part * factor.reshape(-1, *[1] * (x.dim() - 2)), x.exponent)
    nothing = factor.new_empty(0)
    return found, nothing, nothing


@rule("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(a: Arguments) -> Any:
    """Mean pooling over the same windows; as with the maximum, padding does not count."""
    if any(step != 1 for step in a["dilation"]):
        return "max pooling with gaps in its windows"
    note(POOLED)
    part = a["self"].part
    kernel, stride, padding = a["kernel_size"], a["stride"], a["padding"]
    pool = {1: aten.avg_pool1d, 2: aten.avg_pool2d, 3: aten.avg_pool3d}[len(kernel)]
    found = pool(part, kernel, stride or kernel, padding, a["ceil_mode"], False)
    return LinearPart(found, a["self"].exponent), torch.zeros_like(found, dtype=torch.long)


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(a: Arguments) -> Any:
    note(POOLED)
    size = a["output_size"]
    pool = {1: aten.adaptive_avg_pool1d, 2: aten.adaptive_avg_pool2d, 3: aten.adaptive_avg_pool3d}[len(size)]
    found = pool(a["self"].part, size)
    return LinearPart(found, a["self"].exponent), torch.zeros_like(found, dtype=torch.long)


@rule("amax")
def _amax(a: Arguments) -> Any:
    note(POOLED)
    return LinearPart(a["self"].part.mean(a["dim"] or None, a["keepdim"]), a["self"].exponent)


@rule("constant_pad_nd")
def _pad(a: Arguments) -> Any:
    """What is padded with is a constant, whatever it is."""
    return LinearPart(aten.constant_pad_nd(a["self"].part, a["pad"], 0), a["self"].exponent)


@rule("cat")
def _cat(a: Arguments) -> Any:
    return _joined(a, torch.cat)


@rule("stack")
def _stack(a: Arguments) -> Any:
    return _joined(a, torch.stack)


def _joined(a: Arguments, join: Callable[..., Tensor]) -> LinearPart:
    """Constants among the tensors become zeros."""
    moving = [each for each in a["tensors"] if isinstance(each, LinearPart)]
    parts, exponent = aligned(moving)
    left = iter(parts)
    every = [
        next(left) if isinstance(each, LinearPart) else torch.zeros_like(each, dtype=torch.float64)
        for each in a["tensors"]
    ]
    return LinearPart(join(every, a["dim"]), exponent)


@rule("where")
def _where(a: Arguments) -> Any:
    if isinstance(a["condition"], LinearPart):
        return "a choice that depends on the input"
    sides = [a["self"], a["other"]]
    parts, exponent = aligned([side for side in sides if isinstance(side, LinearPart)])
    left = iter(parts)
    x, y = (next(left) if isinstance(side, LinearPart) else torch.zeros((), dtype=torch.float64) for side in sides)
    shape = torch.broadcast_shapes(*(v.shape for v in (a["condition"], *sides) if isinstance(v, Tensor)))
    return LinearPart(torch.where(a["condition"], x, y).expand(shape), exponent)


@rule("masked_fill")
def _masked_fill(a: Arguments) -> Any:
    if isinstance(a["mask"], LinearPart) or isinstance(a["value"], LinearPart):
        return "a mask that depends on the input"
    return LinearPart(a["self"].part.masked_fill(a["mask"], 0), a["self"].exponent)


@rule("_to_copy", "to")
def _to_copy(a: Arguments) -> Any:
    """Linear parts keep their float64 whatever type the model asks for."""
    device = a.get("device")
    x = a["self"]
    return LinearPart(x.part.clone() if device is None else x.part.to(device), x.exponent)


@rule("copy")
def _copy(a: Arguments) -> Any:
    if not isinstance(a["src"], LinearPart):
        return LinearPart(torch.zeros_like(a["self"].part), a["self"].exponent)
    return LinearPart(a["src"].part.expand(a["self"].shape), a["src"].exponent)


@rule("zero", "fill")
def _fill(a: Arguments) -> Any:
    if isinstance(a.get("value"), LinearPart):
        return "a fill that depends on the input"
    return LinearPart(torch.zeros_like(a["self"].part), a["self"].exponent)


@rule("native_dropout", "dropout")
def _dropout(a: Arguments) -> Any:
    x = a["input"]
    return (x, torch.ones_like(x.part, dtype=torch.bool)) if not a["train"] else "dropout while training"


# How each operation acts on linear parts: linear ones as they are, activations not at all, the rest is named


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


# Running a model on linear parts: site by site, what it is a linear map of

Sink = Callable[
    [Site, Tensor, int], Any
]  # (site, (n, width) numbers, exponent): they stand for numbers × 2 ** exponent
AGREE = 1e-9  # of its size: how exactly a combination of inputs must give that combination of outputs


def weighted_layers(model: nn.Module) -> list[str]:
    """The layers that hold a matrix of weights, and the model's own output."""
    names = Names.of(unwrap(model))
    found = []
    for name in names.leaves():
        module = names.by_name[name]
        own = [*module._parameters.values(), *module._buffers.values()]
        if hasattr(module, "parametrizations") or any(p is not None and p.dim() > 1 for p in own):
            found.append(name)
    return [*(name for name in found if name), "."]


@contextmanager
def linearised(
    model: nn.Module, sites: Any, sink: Sink, *, prepare: Callable[[Any], Any] | None = None
) -> Iterator[Linearised]:
    """The model without its activation functions, as long as the block lasts; `sink` gets what each site makes.

    Elementwise activations become the identity, max pooling the mean, batch norm what it is with its running
    statistics; biases vanish. Whatever else is not linear is an error that names it, once a site behind it is read.
    """

    def receive(site: Site, activation: Tensor) -> Any:
        if not isinstance(activation, LinearPart):
            raise NotLinear(f"site {site.label!r} does not depend on the input")
        if activation.broken is not None:
            raise NotLinear(
                f"site {site.label!r} is no linear map of the input: {activation.broken}. Name sites before that"
            )
        if not activation.dim() or activation.shape[0] != run.count:
            raise NotLinear(
                f"site {site.label!r} gives {tuple(activation.shape)} for {run.count} inputs: no row an input"
            )
        rows = activation.part.reshape(run.count, -1)
        if not bool(torch.isfinite(rows).all()):
            raise NotLinear(f"site {site.label!r}: the product of the weights up to here leaves what float64 holds")
        return sink(site, rows, activation.exponent)

    with ExitStack() as stack:
        stack.enter_context(_placed(unwrap(model)))
        seen = stack.enter_context(watch(model, sites, sink=receive))
        run = Linearised(seen, prepare, _dtype(model))
        yield run


class Linearised:
    """A model that is run on linear parts."""

    def __init__(self, seen: Watch, prepare: Callable[[Any], Any] | None, dtype: torch.dtype) -> None:
        self._seen, self._prepare, self._dtype, self.count = seen, prepare, dtype, 0
        self.notes: set[str] = set()  # what was done to the model, in words

    def run(self, inputs: Tensor) -> list[Any]:
        """Give the inputs (n, …) to the model; what the sink returned, site by site."""
        self.count = len(inputs)
        place, claimed, notes = PLACES.set(()), CLAIMED.set(self._dtype), NOTES.set(self.notes)
        try:
            given: Any = LinearPart(inputs.double())
            self._seen.run(given if self._prepare is None else self._prepare(given))
        finally:
            PLACES.reset(place)
            CLAIMED.reset(claimed)
            NOTES.reset(notes)
        return self._seen.values()

    @property
    def sites(self) -> tuple[Site, ...]:
        return self._seen.sites


def _dtype(model: nn.Module) -> torch.dtype:
    """That of the weights."""
    every = (*model.parameters(), *model.buffers())
    return next((tensor.dtype for tensor in every if tensor.is_floating_point()), torch.float32)


def check_linear(name: str, rows: Tensor) -> None:
    """Whether the outputs for x, y and x + 2 y (3, width) are those of a linear map that sees each input alone."""
    expected = rows[0] + 2 * rows[1]
    if bool((rows[2] - expected).abs().max() > AGREE * rows.abs().max()):
        raise NotLinear(
            f"site {name!r}: x + 2 y does not give f(x) + 2 f(y), so inputs of a batch are mixed, or something in the "
            "model is not linear and does not look it"
        )


@contextmanager
def _placed(model: nn.Module) -> Iterator[None]:
    """Note which module is being called, so that errors can name it."""
    handles = []

    def enter(text: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            PLACES.set((*PLACES.get(), text))

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        PLACES.set(PLACES.get()[:-1])

    try:
        for name, module in Names.of(model).unique().items():
            text = (
                f"{name!r} ({type(module).__name__})" if name else f"the model's own forward ({type(module).__name__})"
            )
            handles.append(module.register_forward_pre_hook(enter(text), prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
