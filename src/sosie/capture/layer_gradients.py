"""Gradients input by input at the parameters of common layers, from what went in and what came back.

One batched backward hands each layer the gradient of its output, (inputs, …). With the layer's input that gives the
gradient at its weights for each input apart, as a product over positions; no backward pass an input is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

# (layer, its input, the gradient at its output, inputs) -> (inputs, *shape of the parameter)
Rule = Callable[[Any, Tensor, Tensor, int], Tensor]
MEMORY = {"cpu": 16 * 2**20, "cuda": 2**30}  # bytes of gradients held at a time; a CPU is faster with little
_OTHERS = 256 * 2**20


def rules_of(layer: nn.Module) -> dict[str, Rule]:
    """A rule for each parameter of this layer that has one, by the parameter's name in the layer."""
    for kinds, rules in _RULES:
        if isinstance(layer, kinds):
            return {name: rule for name, rule in rules.items() if layer._parameters.get(name) is not None}
    return {}


@dataclass(eq=False)
class Use:
    """One call of a layer, seen from one of its parameters."""

    rule: Rule
    layer: nn.Module
    x: Tensor
    version: int  # of x when the layer read it
    gradient: Tensor | None = None  # at the layer's output, once the backward has been there

    def each(self, start: int, stop: int, count: int) -> Tensor:
        """The parameter's gradient for the inputs start … stop, in float32 or float64."""
        assert self.gradient is not None
        if self.x._version != self.version:
            raise RuntimeError(
                f"the input of a {type(self.layer).__name__} was overwritten in place after the layer had read it"
            )
        if len(self.x) % count or len(self.gradient) % count:
            raise ValueError(f"{count} inputs, but the layer saw {tuple(self.x.shape)}")
        x, g = (t[start * len(t) // count : stop * len(t) // count] for t in (self.x, self.gradient))
        return self.rule(self.layer, _wide(x), _wide(g), stop - start)

    def workspace(self, count: int) -> int:
        """Numbers an input that the rule holds beside the gradient itself."""
        assert self.gradient is not None
        if self.rule is _conv_weight:
            layer: Any = self.layer
            return layer.in_channels * math.prod(layer.kernel_size) * math.prod(self.gradient.shape[2:])
        return self.x.numel() // count


def each_gradient(uses: Sequence[Use], start: int, stop: int, count: int) -> Tensor:
    """(stop − start, *shape): a parameter that is used several times has the sum over its uses."""
    first, *more = (use.each(start, stop, count) for use in uses)
    for other in more:
        first = first + other
    return first


def sum_of_squares(uses: Sequence[Use], parameter: Tensor, count: int) -> Tensor:
    """Σ over inputs of the squared gradient at a parameter, a few inputs at a time."""
    if len(uses) == 1 and (squares := _at_once(uses[0], count)) is not None:
        return squares
    width = max(parameter.numel(), *(use.workspace(count) for use in uses))
    step = inputs_at_a_time(width, parameter)
    total: Tensor | None = None
    for start in range(0, count, step):
        part = each_gradient(uses, start, min(start + step, count), count).square_().sum(0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def inputs_at_a_time(width: int, like: Tensor) -> int:
    """How many inputs' gradients of so many numbers are held at a time."""
    return max(1, MEMORY.get(like.device.type, _OTHERS) // (width * max(4, like.element_size())))


def _at_once(use: Use, count: int) -> Tensor | None:
    """The same for all inputs in one product, where there is such a way."""
    if use.rule is _embedding_weight:
        return _embedding_squares(use, count)
    if use.rule is _linear_weight and use.x.numel() == count * use.x.shape[-1]:
        # One position an input: (g xᵀ)² is g² (x²)ᵀ, so the sum over inputs is a matrix product.
        assert use.gradient is not None
        squares = [_wide(t).reshape(count, -1).square() for t in (use.gradient, use.x)]
        return squares[0].T @ squares[1]
    return None


def _embedding_squares(use: Use, count: int) -> Tensor:
    """Without a table an input: positions of one input that hold the same token are summed, then squared once."""
    assert use.gradient is not None
    table: Any = use.layer
    tokens, g = use.x.reshape(count, -1), _wide(use.gradient).reshape(count, -1, table.embedding_dim)
    same = (tokens[:, :, None] == tokens[:, None, :]).to(g.dtype)
    # A token that is there m times has its squared sum at each of its m places, so each counts 1/m.
    squares = (same @ g).square_() / same.sum(2, keepdim=True)
    total = squares.new_zeros(table.weight.shape)
    total.index_add_(0, tokens.flatten(), squares.flatten(0, 1))
    return _without_padding(table, total)


def _linear_weight(layer: nn.Linear, x: Tensor, g: Tensor, count: int) -> Tensor:
    x, g = x.reshape(count, -1, layer.in_features), g.reshape(count, -1, layer.out_features)
    return g.mT @ x


def _linear_bias(layer: nn.Linear, x: Tensor, g: Tensor, count: int) -> Tensor:
    return g.reshape(count, -1, layer.out_features).sum(1)


def _conv_weight(layer: _ConvNd, x: Tensor, g: Tensor, count: int) -> Tensor:
    """(inputs, out channels, in channels / groups, *kernel): gradients times the patches that each output saw."""
    space, groups = len(layer.kernel_size), layer.groups
    if x.ndim != space + 2:
        raise ValueError(f"a convolution over {tuple(x.shape)}, which has no inputs to tell apart")
    patches = _patches(layer, x, tuple(g.shape[2:]))
    patches = patches.reshape(count, len(x) // count, groups, -1, math.prod(g.shape[2:]))
    gradients = g.reshape(count, len(x) // count, groups, layer.out_channels // groups, -1)
    # Several images an input (a model that folds frames into the batch, say) are more positions of it.
    patches, gradients = (t.movedim(1, -2).flatten(-2) for t in (patches, gradients))
    return (gradients @ patches.mT).reshape(count, *layer.weight.shape)


def _patches(layer: _ConvNd, x: Tensor, out: tuple[int, ...]) -> Tensor:
    """A view (images, channels, *kernel, *out) of the padded input: what each output position saw."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode).contiguous()
    first, channel, *steps = x.stride()
    by_kernel = [step * d for step, d in zip(steps, layer.dilation, strict=True)]
    by_place = [step * s for step, s in zip(steps, layer.stride, strict=True)]
    size = (*x.shape[:2], *layer.kernel_size, *out)
    return x.as_strided(size, (first, channel, *by_kernel, *by_place))


def _conv_bias(layer: _ConvNd, x: Tensor, g: Tensor, count: int) -> Tensor:
    return g.reshape(count, -1, layer.out_channels, math.prod(g.shape[2:])).sum((1, 3))


def _batch_norm_weight(layer: _BatchNorm, x: Tensor, g: Tensor, count: int) -> Tensor:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    x = F.batch_norm(x, layer.running_mean.to(x.dtype), layer.running_var.to(x.dtype), eps=layer.eps)
    return _over_space(x.mul_(g), count)


def _group_norm_weight(layer: nn.GroupNorm, x: Tensor, g: Tensor, count: int) -> Tensor:
    return _over_space(F.group_norm(x, layer.num_groups, eps=layer.eps).mul_(g), count)


def _channel_bias(layer: nn.Module, x: Tensor, g: Tensor, count: int) -> Tensor:
    return _over_space(g, count)


def _over_space(found: Tensor, count: int) -> Tensor:
    """(images, channels, *space) summed to (inputs, channels)."""
    return found.reshape(count, -1, found.shape[1], math.prod(found.shape[2:])).sum((1, 3))


def _layer_norm_weight(layer: nn.LayerNorm, x: Tensor, g: Tensor, count: int) -> Tensor:
    shape = layer.normalized_shape
    return F.layer_norm(x, shape, eps=layer.eps).mul_(g).reshape(count, -1, *shape).sum(1)


def _layer_norm_bias(layer: nn.LayerNorm, x: Tensor, g: Tensor, count: int) -> Tensor:
    return g.reshape(count, -1, *layer.normalized_shape).sum(1)


def _embedding_weight(layer: nn.Embedding, x: Tensor, g: Tensor, count: int) -> Tensor:
    tokens, g = x.reshape(count, -1), g.reshape(count, -1, layer.embedding_dim)
    found = g.new_zeros(count, *layer.weight.shape)
    found.scatter_add_(1, tokens[:, :, None].expand_as(g), g)
    return _without_padding(layer, found)


def _without_padding(table: nn.Embedding, found: Tensor) -> Tensor:
    """The padding token's row is not trained: its gradient is zero."""
    if table.padding_idx is not None:
        found[..., table.padding_idx, :] = 0
    return found


def _wide(tensor: Tensor) -> Tensor:
    half = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if half else tensor


_RULES: tuple[tuple[tuple[type, ...], dict[str, Rule]], ...] = (
    ((nn.Linear,), {"weight": _linear_weight, "bias": _linear_bias}),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), {"weight": _conv_weight, "bias": _conv_bias}),
    ((_BatchNorm,), {"weight": _batch_norm_weight, "bias": _channel_bias}),
    ((nn.GroupNorm,), {"weight": _group_norm_weight, "bias": _channel_bias}),
    ((nn.LayerNorm,), {"weight": _layer_norm_weight, "bias": _layer_norm_bias}),
    ((nn.Embedding,), {"weight": _embedding_weight}),
)
