"""A network without its activation functions: tensors follow its code, operation by operation, as linear maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _disabled_torch_function_impl
from torch.utils._pytree import tree_leaves, tree_map

from .sites import Names, Site, Watch, unwrap, watch

FAR = 2.0**64  # numbers beyond this, or below its inverse, are rescaled by a power of two

# The active run in this thread.
RUN: ContextVar[LinearRun] = ContextVar("sosie_linearised")


class NotLinear(ValueError):
    """Something in the model is not linear even without its activation functions."""


class LinearPart(Tensor):
    """`part` × 2 ** `exponent`: the part of an activation that is linear in the network's input, in float64.

    Added constants (biases, means) vanish by definition and not by subtraction, so they cost no digits. The exponent
    keeps deep chains from overflowing. `broken` says why a value is no longer linear; this is an error only if the
    value is read.
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
            dtype=RUN.get().claimed if part.is_floating_point() else part.dtype,
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
    """Return a linear part whose numbers are rescaled if they leave the middle of float64's range."""
    largest = float(part.abs().max()) if part.numel() else 0.0
    if largest and math.isfinite(largest) and not 1 / FAR <= largest <= FAR:
        shift = math.frexp(largest)[1]
        return LinearPart(to_exponent(LinearPart(part), shift), exponent + shift)
    return LinearPart(part, exponent)


def aligned(values: Sequence[Any]) -> tuple[list[Tensor | None], int]:
    """Return the numbers of each value at the largest of their exponents; None for constants, which vanish."""
    exponent = max(value.exponent for value in values if isinstance(value, LinearPart))
    return [to_exponent(v, exponent) if isinstance(v, LinearPart) else None for v in values], exponent


def to_exponent(value: LinearPart, exponent: int) -> Tensor:
    """Return the numbers of a value under another exponent."""
    shift = value.exponent - exponent
    if not shift:
        return value.part
    half = shift // 2  # in two steps, since 2 ** 1074 alone would overflow
    first, second = (2.0 ** min(max(s, -1022), 1022) for s in (half, shift - half))
    return value.part * first * second


def place() -> str:
    """Return the innermost module being called, for a message."""
    places = RUN.get().places
    return places[-1] if places else "the model"


# Operations that mix constants with tensors that depend on the input

aten = torch.ops.aten
Arguments = dict[str, Any]  # of an operation, by the names of its schema
LinearRule = Callable[[Arguments], Any]  # returns the linear result, or a text that says why it is not linear
LINEAR_RULES: dict[str, LinearRule] = {}

POOLED = "max pooling counts as mean pooling over the same windows"


def linear_rule(*names: str) -> Callable[[LinearRule], LinearRule]:
    """Register the rule for operations of these names."""

    def register(function: LinearRule) -> LinearRule:
        LINEAR_RULES.update(dict.fromkeys(names, function))
        return function

    return register


def constant(value: Any) -> Any:
    """Return a number or tensor that does not depend on the input, at full precision."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _sum(x: Any, y: Any, factor_x: float, factor_y: float) -> LinearPart:
    """Return a sum of multiples; constants vanish and leave only their shape."""
    shape = torch.broadcast_shapes(*(value.shape for value in (x, y) if isinstance(value, Tensor)))
    parts, exponent = aligned([x, y])
    terms = [p if f == 1 else p * f for p, f in zip(parts, (factor_x, factor_y), strict=True) if p is not None]
    total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    return LinearPart(total.expand(shape) if total.shape != shape else total, exponent)


LINEAR_RULES["add"] = lambda a: _sum(a["self"], a["other"], 1, a.get("alpha", 1))
LINEAR_RULES["sub"] = lambda a: _sum(a["self"], a["other"], 1, -a.get("alpha", 1))
LINEAR_RULES["rsub"] = lambda a: _sum(a["other"], a["self"], 1, -a.get("alpha", 1))


@linear_rule("addmm", "baddbmm", "addmv")
def _addmm(a: Arguments) -> Any:
    x = next(a[name] for name in ("mat1", "batch1", "mat") if name in a)
    y = next(a[name] for name in ("mat2", "batch2", "vec") if name in a)
    product = _product("matmul", (x, y), {}) if isinstance(x, LinearPart) or isinstance(y, LinearPart) else x @ y
    return product if isinstance(product, str) else _sum(a["self"], product, a.get("beta", 1), a.get("alpha", 1))


def _product(name: str, args: Sequence[Any], kwargs: Arguments) -> LinearPart | str:
    """Return the product of one linear part and constants; an added bias vanishes."""
    moving = [arg for arg in args if isinstance(arg, LinearPart)]
    if len(moving) > 1:
        return "a product of two tensors that both depend on the input"
    if name == "div" and not isinstance(args[0], LinearPart):
        return "a division by something that depends on the input"
    if kwargs.get("rounding_mode") is not None:
        return "a rounded division"
    constants = _inner(args)
    if name in BIASED:
        if not any(isinstance(arg, LinearPart) for arg in args[:2]):
            return "a bias that depends on the input"
        constants = (*constants[:2], None, *constants[3:])
    return scaled(getattr(aten, name)(*constants), moving[0].exponent)


@linear_rule(
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
    normalised = scaled(x.part * factor.reshape(-1, *[1] * (x.dim() - 2)), x.exponent)
    return normalised, factor.new_empty(0), factor.new_empty(0)


@linear_rule(
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
def _max_pool(a: Arguments) -> Any:
    """Mean pooling over the same windows; padding is not counted, as in max pooling."""
    if any(step != 1 for step in a.get("dilation", ())):
        return "max pooling with gaps in its windows"
    RUN.get().notes.add(POOLED)
    part = a["self"].part
    if "output_size" in a:
        pool = getattr(aten, f"adaptive_avg_pool{len(a['output_size'])}d")
        pooled = pool(part, a["output_size"])
    else:
        pool = getattr(aten, f"avg_pool{len(a['kernel_size'])}d")
        pooled = pool(part, a["kernel_size"], a["stride"] or a["kernel_size"], a["padding"], a["ceil_mode"], False)
    return LinearPart(pooled, a["self"].exponent), torch.zeros_like(pooled, dtype=torch.long)


@linear_rule("amax")
def _amax(a: Arguments) -> Any:
    RUN.get().notes.add(POOLED)
    return LinearPart(a["self"].part.mean(a["dim"] or None, a["keepdim"]), a["self"].exponent)


@linear_rule("constant_pad_nd")
def _pad(a: Arguments) -> Any:
    """The padding is a constant, so it becomes zeros."""
    return LinearPart(aten.constant_pad_nd(a["self"].part, a["pad"], 0), a["self"].exponent)


def _joined(join: Callable[..., Tensor], a: Arguments) -> LinearPart:
    """Constants among the tensors become zeros."""
    parts, exponent = aligned(a["tensors"])
    tensors = [
        torch.zeros_like(constant, dtype=torch.float64) if part is None else part
        for constant, part in zip(a["tensors"], parts, strict=True)
    ]
    return LinearPart(join(tensors, a["dim"]), exponent)


LINEAR_RULES["cat"], LINEAR_RULES["stack"] = partial(_joined, torch.cat), partial(_joined, torch.stack)


@linear_rule("where")
def _where(a: Arguments) -> Any:
    if isinstance(a["condition"], LinearPart):
        return "a choice that depends on the input"
    sides = [a["self"], a["other"]]
    parts, exponent = aligned(sides)
    x, y = (torch.zeros((), dtype=torch.float64) if part is None else part for part in parts)
    shape = torch.broadcast_shapes(*(v.shape for v in (a["condition"], *sides) if isinstance(v, Tensor)))
    return LinearPart(torch.where(a["condition"], x, y).expand(shape), exponent)


@linear_rule("masked_fill")
def _masked_fill(a: Arguments) -> Any:
    if isinstance(a["mask"], LinearPart) or isinstance(a["value"], LinearPart):
        return "a mask that depends on the input"
    return LinearPart(a["self"].part.masked_fill(a["mask"], 0), a["self"].exponent)


@linear_rule("_to_copy", "to")
def _to_copy(a: Arguments) -> Any:
    """Linear parts stay in float64 whatever type the model requests."""
    device = a.get("device")
    x = a["self"]
    return LinearPart(x.part.clone() if device is None else x.part.to(device), x.exponent)


@linear_rule("copy")
def _copy(a: Arguments) -> Any:
    if not isinstance(a["src"], LinearPart):
        return LinearPart(torch.zeros_like(a["self"].part), a["self"].exponent)
    return LinearPart(a["src"].part.expand(a["self"].shape), a["src"].exponent)


@linear_rule("zero", "fill")
def _fill(a: Arguments) -> Any:
    if isinstance(a.get("value"), LinearPart):
        return "a fill that depends on the input"
    return LinearPart(torch.zeros_like(a["self"].part), a["self"].exponent)


@linear_rule("native_dropout", "dropout")
def _dropout(a: Arguments) -> Any:
    x = a["input"]
    return (x, torch.ones_like(x.part, dtype=torch.bool)) if not a["train"] else "dropout while training"


# How each operation acts on linear parts; operations that are not listed are reported as not linear


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Elementwise activation functions, each replaced by the identity.
ACTIVATIONS = _words(
    "relu relu6 leaky_relu gelu silu sigmoid tanh elu celu selu hardtanh hardswish hardsigmoid softplus mish "
    "_prelu_kernel prelu rrelu_with_noise threshold clamp clamp_min clamp_max log_sigmoid softshrink hardshrink"
)
# Operations that are linear in one tensor and add no constant: they act on the part as on the whole.
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
# Products of constants and one tensor that depends on the input.
PRODUCTS = _words("mul div mm bmm mv dot matmul linear convolution _convolution")
BIASED = _words("linear convolution _convolution")  # the third argument is added
# Constants that take only their shape from an activation.
SHAPES = _words("ones_like full_like rand_like randn_like new_ones new_full")
# Tensors to be written into, which do not depend on the input yet.
BLANK = _words("zeros_like new_zeros empty_like new_empty new_empty_strided")
READS = _words("_local_scalar_dense item equal is_nonzero")


def follow(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on linear parts."""
    first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LinearPart))
    name, schema = func._schema.name.removeprefix("aten::"), func._schema.arguments
    if name in READS:
        raise NotLinear(f"{place()} decides by what it computes ({name.strip('_')}), which no linear map does")
    arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
    arguments |= {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs
    written = next((a.name for a in schema if a.alias_info is not None and a.alias_info.is_write), None)
    run = RUN.get()
    claimed = run.claimed
    run.claimed = kwargs.get("dtype") or (first.dtype if first.is_floating_point() else claimed)
    try:
        if written is None:
            return _result(name, func, args, kwargs, arguments)
        target = arguments[written]
        if not isinstance(target, LinearPart):
            raise NotLinear(
                f"{place()} writes what depends on the input into a tensor that does not ({name}): pad or concatenate "
                "instead"
            )
        result = _result(name.removesuffix("_"), func, args, kwargs, arguments, overwrites=True)
    finally:
        run.claimed = claimed
    # In place: tensors that share the target's memory change too.
    reason = result if isinstance(result, str) else result.broken
    if reason is not None:
        if target.part._is_view():
            raise NotLinear(f"{reason} is not linear, and it changes a part of a tensor in place")
        target.broken = reason
    elif result is not target:
        target.part.copy_(to_exponent(result, target.exponent))
    return target


def _result(name: str, func: Any, args: Any, kwargs: Any, arguments: Arguments, *, overwrites: bool = False) -> Any:
    parts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LinearPart)]
    reason = next((part.broken for part in parts if part.broken is not None), None)
    if reason is None:
        if name in ACTIVATIONS:
            return parts[0]
        if name in LINEAR_RULES or name in PRODUCTS:
            result = LINEAR_RULES[name](arguments) if name in LINEAR_RULES else _product(name, args, kwargs)
            if not isinstance(result, str):
                return result
            reason = f"{result} in {place()}"
        elif name in SHAPES:
            filled = func(*_inner(args), **_inner(kwargs))
            return filled.to(RUN.get().claimed) if filled.is_floating_point() else filled
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
        # Computed for its shape and type; reading it raises an error with the reason.
        return _wrapped(func(*_inner(args), **_inner(kwargs)), 0, reason)
    except Exception as error:
        if name == "embedding":
            raise NotLinear(f"{place()} looks up token ids, so the model is not a linear map of its input") from error
        raise NotLinear(f"{reason} is not linear, and it does not take float64 numbers ({error})") from error


def _inner(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.part if isinstance(leaf, LinearPart) else constant(leaf), tree)


def _wrapped(tree: Any, exponent: int, reason: str | None) -> Any:
    return tree_map(lambda leaf: LinearPart(leaf, exponent, reason) if isinstance(leaf, Tensor) else leaf, tree)


# Running a model on linear parts, site by site

# Called with a site, its numbers (n, width) and an exponent: they stand for numbers × 2 ** exponent.
Sink = Callable[[Site, Tensor, int], Any]
AGREE = 1e-9  # the relative tolerance when a combination of inputs must give the same combination of outputs


def weighted_layers(model: nn.Module) -> list[str]:
    """Return the layers with a weight matrix, and the model's own output."""
    names = Names.of(unwrap(model))
    layers = []
    for name in names.leaves():
        module = names.by_name[name]
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if hasattr(module, "parametrizations") or any(t is not None and t.dim() > 1 for t in tensors):
            layers.append(name)
    return [*(name for name in layers if name), "."]


@contextmanager
def linearised(
    model: nn.Module, sites: Any, sink: Sink, *, prepare: Callable[[Any], Any] | None = None
) -> Iterator[LinearRun]:
    """Run the model without its activation functions within the block; `sink` receives the output of each site.

    Elementwise activations become the identity, max pooling the mean, batch norm uses its running statistics; biases
    vanish. Any other operation that is not linear is an error that names it, raised when a later site is read.
    """

    def receive(site: Site, activation: Tensor) -> Any:
        if not isinstance(activation, LinearPart):
            raise NotLinear(f"site {site.label!r} does not depend on the input")
        if activation.broken is not None:
            raise NotLinear(f"site {site.label!r} is not linear in the input: {activation.broken}. Name earlier sites")
        if not activation.dim() or activation.shape[0] != run.count:
            raise NotLinear(f"site {site.label!r} gives {tuple(activation.shape)}, not a row for each of {run.count}")
        rows = activation.part.reshape(run.count, -1)
        if not bool(torch.isfinite(rows).all()):
            raise NotLinear(f"site {site.label!r}: the product of the weights up to here exceeds the range of float64")
        return sink(site, rows, activation.exponent)

    with watch(model, sites, sink=receive, axes=False) as seen:
        weights = (tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
        run = LinearRun(seen, prepare, next(weights, torch.float32))
        with _placed(unwrap(model), run.places):
            yield run


class LinearRun:
    """A model that runs on linear parts."""

    def __init__(self, seen: Watch, prepare: Callable[[Any], Any] | None, dtype: torch.dtype) -> None:
        self._seen, self._prepare, self.count = seen, prepare, 0
        # The type that linear parts report, that of the model's weights, since operations refuse to mix types.
        self.claimed = dtype
        self.places: list[str] = []  # the modules being called, outermost first
        self.notes: set[str] = set()  # replacements of operations that are not linear, in words

    def run(self, inputs: Tensor) -> list[Any]:
        """Run the model on inputs (n, …) and return the result of the sink for each site."""
        self.count = len(inputs)
        self.places.clear()
        token = RUN.set(self)
        try:
            linear: Any = LinearPart(inputs.double())
            self._seen.run(linear if self._prepare is None else self._prepare(linear))
        finally:
            RUN.reset(token)
        return self._seen.values()

    @property
    def sites(self) -> tuple[Site, ...]:
        return self._seen.sites


def check_linear(name: str, rows: Tensor) -> None:
    """Raise unless the outputs for x, y and x + 2 y (3, width) are those of a linear map that sees each input alone."""
    expected = rows[0] + 2 * rows[1]
    if bool((rows[2] - expected).abs().max() > AGREE * rows.abs().max()):
        raise NotLinear(
            f"site {name!r}: x + 2 y does not give f(x) + 2 f(y), so the inputs of a batch are mixed, or the model has "
            "an operation that looks linear but is not"
        )


@contextmanager
def _placed(model: nn.Module, places: list[str]) -> Iterator[None]:
    """Record which modules are being called, so that errors can name them."""

    def enter(text: str, *_: Any) -> None:
        places.append(text)

    def leave(*_: Any) -> None:
        places.pop()

    with ExitStack() as stack:
        for name, module in Names.of(model).unique().items():
            kind = type(module).__name__
            text = f"{name!r} ({kind})" if name else f"the model's own forward ({kind})"
            stack.callback(module.register_forward_pre_hook(partial(enter, text), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
