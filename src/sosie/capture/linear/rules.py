"""Operations that mix constants with what depends on the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .part import LinearPart, aligned, note, scaled

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
