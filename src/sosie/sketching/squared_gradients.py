"""Squares of gradients input by input, summed over inputs, at any parameters of any model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..capture import Chunk, answer_in, cut, unwrap
from ..capture.arguments import CallArguments
from ..capture.watch import every_module_called
from ..process_state import full_precision, products

# Gradients input by input at the parameters of common layers, from what went in and what came back
#
# One batched backward hands each layer the gradient of its output, (inputs, …). With the layer's input that gives the
# gradient at its weights for each input apart, as a product over positions; no backward pass an input is needed.

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


PROBE = 2  # inputs on which the rules of layers are held against autograd
AGREE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative difference that rounding may make
AGREE_IN_HALF = 0.05

Take = Callable[[str, list[Use], int], None]
Layers = list[tuple[nn.Module, dict[str, Rule]]]  # a layer, and a rule for each parameter by its name in the model


class Run(Protocol):
    """A model over data: what it is called with, and what it answers, (inputs, …)."""

    model: nn.Module

    def arguments(self, chunk: Chunk) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def outputs(self, chunk: Chunk) -> Tensor: ...


class SquaredGradients:
    """Σ over inputs of (∂⟨c, f(x)⟩/∂θ)² at each parameter θ, for cotangents c at the model's answer f(x).

    Parameters of common layers (`rules_of`) take one batched backward. On the first two inputs these gradients are
    held against autograd's of the first alone; parameters where they differ (used by hand as well, or by a layer that
    computes something else), and those without a rule, go through torch.func instead: right, but slower.
    The model is in eval mode inside `as_found`, which puts back what is changed here: the parameters' requires_grad.
    """

    def __init__(self, run: Run, parameters: Mapping[str, nn.Parameter]) -> None:
        self._run, self._parameters = run, parameters
        _refuse_batch_statistics(run.model)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._layers: Layers = []
        for layer in run.model.modules():
            own = {names.get(id(layer._parameters[key])): rule for key, rule in rules_of(layer).items()}
            if known := {name: rule for name, rule in own.items() if name is not None}:
                self._layers.append((layer, known))
        ruled = {name for _, rules in self._layers for name in rules}
        self.elsewhere = {name for name in parameters if name not in ruled}  # through torch.func
        self._tried = 0  # inputs on which the rules were tried
        with torch.inference_mode(False):
            self.sums = {
                name: torch.zeros(p.shape, dtype=torch.float64, device=p.device if p.is_cuda else "cpu")
                for name, p in parameters.items()
            }

    def add(self, chunk: Chunk, cotangents: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """Add a chunk's squares: `cotangents(answers)` are (inputs, …) each, and what they give is summed too."""
        with every_module_called(self._run.model), torch.inference_mode(False), torch.enable_grad():
            if self._tried < (few := min(PROBE, chunk.count)):
                self._try_rules(Chunk(cut(chunk.batch, 0, few), chunk.start, few))
                self._tried = few
            tape, answers = self._forward(chunk)
            asked = [cotangent.to(answers) for cotangent in cotangents(answers.detach())]
            for k, cotangent in enumerate(asked):
                tape.backward(answers, cotangent, self._square, again=k + 1 < len(asked))
            del tape, answers
            if self.elsewhere:
                self._by_function(chunk, asked)

    def _forward(self, chunk: Chunk, trained: Sequence[nn.Parameter] = ()) -> tuple[_Tape, Tensor]:
        # No gradient at a weight, which a backward would sum over inputs; the tape starts the graph instead.
        for parameter in self._run.model.parameters():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_()
        tape = _Tape(self._layers, chunk.count)
        with tape.listening():
            return tape, self._run.outputs(chunk)

    def _square(self, name: str, uses: list[Use], count: int) -> None:
        if name not in self.elsewhere:
            with products():
                self._add(name, sum_of_squares(uses, self._parameters[name], count))

    def _add(self, name: str, squares: Tensor) -> None:
        self.sums[name] += squares.to(self.sums[name].device)

    # Which parameters the rules get right

    @full_precision()
    def _try_rules(self, few: Chunk) -> None:
        """One forward and one backward from the first input's answer alone, of which autograd and the rules both see.

        The rules must find autograd's gradients for the first input, and none for the others.
        """
        found: dict[str, Tensor] = {}

        def take(name: str, uses: list[Use], count: int) -> None:
            try:
                with products():
                    found[name] = _wide_gradient(each_gradient(uses, 0, count, count))
            except (RuntimeError, ValueError):
                self.elsewhere.add(name)  # this layer's shapes do not tell the inputs apart

        ruled = [name for name in self._parameters if name not in self.elsewhere]
        if not ruled:
            return
        trained = [self._parameters[name] for name in ruled]
        tape, answers = self._forward(few, trained)
        # Random cotangents: a confident model's own gradients are next to nothing, and would all agree.
        random = torch.Generator().manual_seed(0)
        cotangent = torch.randn(answers.shape, generator=random, dtype=torch.float64).to(answers)
        cotangent[1:] = 0
        gradients = tape.backward(answers, cotangent, take, again=False, trained=trained)
        names = [name for name in ruled if name not in self.elsewhere]
        if not names:
            return
        known = {name: g for name, g in zip(ruled, gradients, strict=True) if g is not None}
        expected = [_wide_gradient(known.get(name, torch.zeros_like(self._parameters[name]))) for name in names]
        first, others = [], []
        for name, gradient in zip(names, expected, strict=True):
            each = found.get(name)
            first.append(torch.zeros_like(gradient) if each is None else each[0])
            others.append(gradient.new_zeros(1) if each is None or len(each) == 1 else each[1:])
        off = _norms(torch._foreach_sub(first, expected)) + _norms(others)
        self.elsewhere |= self._apart(names, off, _norms(expected))

    def _apart(self, names: list[str], off: Tensor, norms: Tensor) -> set[str]:
        """Names of the parameters whose gradients are further off than rounding takes them."""
        gaps, sizes = torch.stack([off, norms]).tolist()
        largest = max(sizes)
        found = set()
        for name, gap, norm in zip(names, gaps, sizes, strict=True):
            dtype, device = self._parameters[name].dtype, self._parameters[name].device.type
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)  # in which autograd's side of it was multiplied
            # Where a gradient cancels to nothing (a bias that a norm takes away), rounding is all there is.
            rounding = 8 * torch.finfo(dtype).eps * largest
            if not gap <= max(AGREE.get(dtype, AGREE_IN_HALF) * norm, rounding):
                found.add(name)
        return found

    # All other parameters

    def _by_function(self, chunk: Chunk, cotangents: Sequence[Tensor]) -> None:
        root = unwrap(self._run.model)
        real = {id(parameter): name for name, parameter in root.named_parameters()}
        own = {real[id(self._parameters[name])]: name for name in sorted(self.elsewhere)}
        values = {name: self._parameters[own[name]].detach() for name in own}
        call = CallArguments(*self._run.arguments(chunk))
        leaves = call.leaves()
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise TypeError(f"gradients at {_few(own.values())} need a model that is called with tensors alone")

        def answer(inputs: list[Tensor], values: dict[str, Tensor]) -> Tensor:
            parts = iter(inputs)
            one = call.map(lambda _, leaf: next(parts)[None])
            found = answer_in(functional_call(root, values, one.args, one.kwargs))
            assert found is not None
            return found[0]

        def squares(inputs: list[Tensor], cotangents: Tensor) -> dict[str, Tensor]:
            back = vjp(partial(answer, inputs), values)[1]
            (gradients,) = vmap(back)(cotangents)
            return {name: gradient.square().sum(0) for name, gradient in gradients.items()}

        stacked = torch.stack(list(cotangents), dim=1)
        width = sum(value.numel() for value in values.values()) * len(cotangents)
        step = inputs_at_a_time(width, stacked)
        try:
            for start in range(0, chunk.count, step):
                stop = min(start + step, chunk.count)
                few = vmap(squares)([leaf[start:stop] for leaf in leaves], stacked[start:stop])
                for name, found in few.items():
                    self._add(own[name], found.sum(0, dtype=torch.float64 if found.is_cuda else None))
        except RuntimeError as error:
            error.add_note(
                f"while torch.func took gradients at {_few(own.values())}, which no rule covers; leave_out= can name "
                "parameters that are not to count"
            )
            raise


class _Tape:
    """What a forward shows of the layers with rules, until the backward has been at each."""

    def __init__(self, layers: Layers, count: int) -> None:
        self._layers, self._count = layers, count
        self._uses: dict[str, list[Use]] = {}
        self._starts: list[Tensor] = []
        self._take: Take | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        handles = []
        try:
            for layer, rules in self._layers:
                hook = partial(self._hear, rules)
                handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hear(self, rules: dict[str, Rule], layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        if not torch.is_grad_enabled() or not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return None
        made = None
        if not output.requires_grad:
            start = output.detach().requires_grad_()
            self._starts.append(start)
            output = made = start.clone()  # a leaf could not be overwritten in place by what comes next
        uses = [(name, Use(rule, layer, x.detach(), x._version)) for name, rule in rules.items()]
        for name, use in uses:
            self._uses.setdefault(name, []).append(use)
        output.register_hook(partial(self._arrive, uses))
        return made

    def _arrive(self, uses: list[tuple[str, Use]], gradient: Tensor) -> None:
        for name, use in uses:
            use.gradient = gradient
            if all(other.gradient is not None for other in self._uses[name]):
                self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        """A parameter's uses, once the backward has been at all of them: gradients add up before they are squared."""
        assert self._take is not None
        reached = [use for use in self._uses[name] if use.gradient is not None]
        if reached:
            self._take(name, reached, self._count)
        for use in reached:
            use.gradient = None

    def backward(
        self, answers: Tensor, cotangent: Tensor, take: Take, *, again: bool, trained: Sequence[Tensor] = ()
    ) -> Sequence[Tensor | None]:
        """`take(name, uses, inputs)` for each parameter that has a part in the answers; gradients at those trained."""
        if not answers.requires_grad:
            return [None] * len(trained)
        self._take = take
        ends = [*trained, *self._starts]
        gradients = torch.autograd.grad(answers, ends, cotangent, retain_graph=again, allow_unused=True)
        for name in self._uses:
            self._hand_over(name)  # those with a use that leads nowhere
        return gradients[: len(trained)]


def _wide_gradient(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.element_size() < 4 else gradient


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Of each, in few launches, in float64."""
    found = torch._foreach_norm(list(tensors))
    return torch.cat([norm.reshape(1).to(found[0].device) for norm in found]).double()


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) keeps no running statistics, so that an answer "
                "depends on the other inputs of its batch: one input has no gradient of its own"
            )


def _few(names: Any) -> str:
    shown = list(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
