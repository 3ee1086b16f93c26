"""Squares of the gradients of each input, summed over inputs, at any parameters of any model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..capture import Chunk, answer_in, cut, unwrap
from ..capture.batches import CallArguments
from ..capture.restore import every_module_called
from ..engine.network import Network
from ..process_state import full_precision, products

MEMORY = {"cpu": 16 * 2**20, "cuda": 2**30}  # bytes of gradients held at a time; a CPU is faster with few
_OTHERS = 256 * 2**20
PROBE = 2  # inputs on which gradients layer by layer are compared with autograd's
AGREE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative difference that rounding may make
AGREE_IN_HALF = 0.05


class _Call(NamedTuple):
    """One call of a layer, and the gradient at its output."""

    layer: nn.Module
    key: str  # the layer's name for the parameter
    x: Tensor
    version: int  # of x when the layer read it
    gradient: Tensor


Take = Callable[[str, list[_Call]], None]


class SquaredGradients:
    """Σ over inputs of (∂⟨c, f(x)⟩/∂θ)² at each parameter θ, for cotangents c at the model's answer f(x).

    One batched backward pass gives the gradient at the output of each layer, (inputs, …); together with the layer's
    input that gives the gradient at its parameters for each input (`gradient_of_each`). On the first two inputs these
    gradients are compared with autograd's. Parameters where they differ (used outside of their layer as well, or by a
    layer that does not keep inputs apart), and those that belong to no single layer, go through torch.func over the
    whole model, which is slower: with torch.func for all parameters a ResNet-18 takes 2 times as long on a CPU and 9
    times on an H200 (bench/task2vec.py).
    The model is in eval mode inside `as_found`, which restores the parameters' requires_grad, changed here.
    """

    def __init__(self, network: Network, parameters: Mapping[str, nn.Parameter]) -> None:
        self._network, self._parameters = network, parameters
        for name, module in network.model.named_modules():
            if isinstance(module, _BatchNorm) and module.running_mean is None:
                raise ValueError(
                    f"{name or 'the model'} ({type(module).__name__}) keeps no running statistics, so an answer "
                    "depends on the other inputs of its batch: one input has no gradient of its own"
                )
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._layers: list[tuple[nn.Module, dict[str, str]]] = []  # with names of parameters by the layer's own
        for layer in network.model.modules():
            if isinstance(layer, (nn.Linear, _ConvNd)) or not any(True for _ in layer.children()):
                own = {key: names[id(p)] for key, p in layer._parameters.items() if id(p) in names}
                if own:
                    self._layers.append((layer, own))
        self.elsewhere = set(parameters).difference(*(own.values() for _, own in self._layers))  # through torch.func
        self._tried = 0  # inputs on which the layers were tried
        with torch.inference_mode(False):
            self.sums = {
                name: torch.zeros(p.shape, dtype=torch.float64, device=p.device if p.is_cuda else "cpu")
                for name, p in parameters.items()
            }

    def add(self, chunk: Chunk, cotangents: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """Add the squares of a chunk, summed over the `cotangents(answers)`, which are (inputs, …) each."""

        def square(name: str, calls: list[_Call]) -> None:
            if name not in self.elsewhere:
                with products():
                    self._add(name, _sum_of_squares(calls, self._parameters[name], chunk.count))

        with every_module_called(self._network.model), torch.inference_mode(False), torch.enable_grad():
            if self._tried < (few := min(PROBE, chunk.count)):
                self._try_layers(Chunk(cut(chunk.batch, 0, few), chunk.start, few))
                self._tried = few
            answers, backward = self._forward(chunk, square)
            pulls = [cotangent.to(answers) for cotangent in cotangents(answers.detach())]
            for k, cotangent in enumerate(pulls):
                backward(cotangent, k + 1 < len(pulls))
            del answers, backward
            if self.elsewhere:
                self._by_function(chunk, pulls)

    def _forward(
        self, chunk: Chunk, take: Take, trained: Sequence[nn.Parameter] = ()
    ) -> tuple[Tensor, Callable[[Tensor, bool], Sequence[Tensor | None]]]:
        """The answers, and a function that runs backwards from a cotangent at them (True: it will run once more).

        The function calls `take` with every parameter and all calls of layers that use it, and returns the gradients at
        the `trained` parameters.
        """
        # No gradient at a weight, which a backward pass would sum over inputs: the graph begins at the first layers.
        for parameter in self._network.model.parameters():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_()
        uses: Counter[str] = Counter()  # how many calls of layers use a parameter
        arrived: dict[str, list[_Call]] = {}  # those of them that the backward pass has reached
        starts: list[Tensor] = []  # where the graph begins

        def listen(own: dict[str, str], layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            """A forward hook that keeps the layer's input until the gradient at its output is known."""
            x = args[0] if args else kwargs.get("input")
            if not torch.is_grad_enabled() or not isinstance(x, Tensor) or not isinstance(output, Tensor):
                return None
            replaced = None
            if not output.requires_grad:
                starts.append(output.detach().requires_grad_())
                output = replaced = starts[-1].clone()  # a leaf must not be overwritten in place by the next layer
            uses.update(own.values())
            x, version = x.detach(), x._version

            def arrive(gradient: Tensor) -> None:
                for key, name in own.items():
                    arrived.setdefault(name, []).append(_Call(layer, key, x, version, gradient))
                    if len(arrived[name]) == uses[name]:  # gradients are summed before they are squared
                        take(name, arrived.pop(name))

            output.register_hook(arrive)
            return replaced

        def backward(cotangent: Tensor, again: bool) -> Sequence[Tensor | None]:
            if not answers.requires_grad:
                return [None] * len(trained)
            ends = [*trained, *starts]
            gradients = torch.autograd.grad(answers, ends, cotangent, retain_graph=again, allow_unused=True)
            while arrived:  # parameters with a call that the answers do not depend on
                take(*arrived.popitem())
            return gradients[: len(trained)]

        handles = [
            layer.register_forward_hook(partial(listen, own), prepend=True, with_kwargs=True)
            for layer, own in self._layers
        ]
        try:
            answers = self._network.outputs(chunk)
        finally:
            for handle in handles:
                handle.remove()
        return answers, backward

    def _add(self, name: str, squares: Tensor) -> None:
        self.sums[name] += squares.to(self.sums[name].device)

    @full_precision()
    def _try_layers(self, few: Chunk) -> None:
        """Run backwards from the first input's answer alone, and compare the layers' gradients with autograd's.

        The layers must find autograd's gradients for the first input, and none for the others.
        """
        each: dict[str, Tensor] = {}

        def take(name: str, calls: list[_Call]) -> None:
            try:
                with products():
                    each[name] = _wide(_each(calls, 0, few.count, few.count))
            except (RuntimeError, ValueError, TypeError):
                self.elsewhere.add(name)  # the shapes of this layer do not keep inputs apart

        tried = [name for name in self._parameters if name not in self.elsewhere]
        if not tried:
            return
        trained = [self._parameters[name] for name in tried]
        answers, backward = self._forward(few, take, trained)
        # A random cotangent: a confident model's own gradients are next to nothing, and would all agree.
        random = torch.Generator().manual_seed(0)
        cotangent = torch.randn(answers.shape, generator=random, dtype=torch.float64).to(answers)
        cotangent[1:] = 0
        norms: dict[str, Tensor] = {}  # of the difference from autograd's gradient, and of that gradient
        for name, parameter, gradient in zip(tried, trained, backward(cotangent, False), strict=True):
            if name not in self.elsewhere:
                expected = _wide(torch.zeros_like(parameter) if gradient is None else gradient)
                layerwise = each.get(name, torch.zeros_like(expected)[None])
                difference = (layerwise[0] - expected).norm() + layerwise[1:].norm()
                norms[name] = torch.stack([difference, expected.norm()]).double()
        if not norms:
            return
        table = torch.stack([pair.to(answers.device) for pair in norms.values()])  # read from the device at once
        largest = float(table[:, 1].max())
        for name, (difference, size) in zip(norms, table.tolist(), strict=True):
            dtype, device = self._parameters[name].dtype, self._parameters[name].device.type
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)  # of the products behind autograd's gradient
            # Where a gradient cancels to nothing (that of a bias before a norm, say), rounding is all that is left.
            rounding = 8 * torch.finfo(dtype).eps * largest
            if not difference <= max(AGREE.get(dtype, AGREE_IN_HALF) * size, rounding):
                self.elsewhere.add(name)

    def _by_function(self, chunk: Chunk, cotangents: Sequence[Tensor]) -> None:
        """Add the squares at all other parameters, by torch.func."""
        root = unwrap(self._network.model)
        real = {id(parameter): name for name, parameter in root.named_parameters()}
        own = {real[id(self._parameters[name])]: name for name in sorted(self.elsewhere)}
        values = {name: self._parameters[own[name]].detach() for name in own}
        call = CallArguments(*self._network.arguments(chunk))
        leaves = call.leaves()
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise TypeError(f"gradients at {_few(own.values())} need a model whose arguments are all tensors")

        def answer(inputs: list[Tensor], values: dict[str, Tensor]) -> Tensor:
            parts = iter(inputs)
            one = call.map(lambda _, leaf: next(parts)[None])
            made = answer_in(functional_call(root, values, one.args, one.kwargs))
            assert made is not None
            return made[0]

        def squares(inputs: list[Tensor], cotangents: Tensor) -> dict[str, Tensor]:
            back = vjp(partial(answer, inputs), values)[1]
            (gradients,) = vmap(back)(cotangents)
            return {name: gradient.square().sum(0) for name, gradient in gradients.items()}

        stacked = torch.stack(list(cotangents), dim=1)
        step = _inputs_at_a_time(sum(value.numel() for value in values.values()) * len(cotangents), stacked)
        try:
            for start in range(0, chunk.count, step):
                stop = min(start + step, chunk.count)
                few = vmap(squares)([leaf[start:stop] for leaf in leaves], stacked[start:stop])
                for name, each in few.items():
                    self._add(own[name], each.sum(0, dtype=torch.float64 if each.is_cuda else None))
        except RuntimeError as error:
            error.add_note(
                f"while torch.func computed gradients at {_few(own.values())}, which no rule for a layer covers; "
                "leave_out= leaves parameters out"
            )
            raise


def _sum_of_squares(calls: Sequence[_Call], parameter: Tensor, count: int) -> Tensor:
    """Σ over inputs of the squared gradient at a parameter, computed for a few inputs at a time."""
    layer, key, x, _, g = calls[0]
    if len(calls) == 1 and isinstance(layer, nn.Linear) and key == "weight" and x.numel() == count * x.shape[-1]:
        # One position per input: (g xᵀ)² is g² (x²)ᵀ, so the sum over inputs is a matrix product.
        x, g = (_wide(t).reshape(count, -1).square() for t in (x, g))
        return g.T @ x
    if len(calls) == 1 and isinstance(layer, nn.Embedding):
        # Without a table per input, which takes 3 times as long for a small transformer with 30,000 words. Positions of
        # one input that hold the same token are summed, then squared; m of them repeat the sum m times, so each counts
        # 1/m.
        tokens, g = x.reshape(count, -1), _wide(g).reshape(count, -1, layer.embedding_dim)
        same = (tokens[:, :, None] == tokens[:, None, :]).to(g.dtype)
        squares = (same @ g).square_() / same.sum(2, keepdim=True)
        total = squares.new_zeros(parameter.shape).index_add_(0, tokens.flatten(), squares.flatten(0, 1))
        if layer.padding_idx is not None:
            total[layer.padding_idx] = 0  # its row is not trained
        return total
    workspace = max(call.x.numel() // count for call in calls)
    if isinstance(layer, _ConvNd):
        workspace = layer.in_channels * math.prod(layer.kernel_size) * g.numel() // (layer.out_channels * count)
    step = _inputs_at_a_time(max(parameter.numel(), workspace), parameter)
    return sum(  # type: ignore[return-value]
        _each(calls, start, min(start + step, count), count).square_().sum(0) for start in range(0, count, step)
    )


def _inputs_at_a_time(width: int, like: Tensor) -> int:
    """For how many inputs to hold gradients of so many numbers at a time."""
    return max(1, MEMORY.get(like.device.type, _OTHERS) // (width * max(4, like.element_size())))


def _each(calls: Sequence[_Call], start: int, stop: int, count: int) -> Tensor:
    """(stop − start, *shape): a parameter's gradients for some inputs, summed over its calls, in float32 at least."""
    total: Tensor | None = None
    for layer, key, x, version, g in calls:
        if x._version != version:
            raise RuntimeError(f"the input of a {type(layer).__name__} was overwritten in place after it was read")
        if len(x) % count or len(g) % count:
            raise ValueError(f"{count} inputs, but the layer saw {tuple(x.shape)}")
        x, g = (_wide(t[start * len(t) // count : stop * len(t) // count]) for t in (x, g))
        each = gradient_of_each(layer, key, x, g, stop - start)
        total = each if total is None else total + each
    assert total is not None
    return total


def gradient_of_each(layer: nn.Module, key: str, x: Tensor, g: Tensor, count: int) -> Tensor:
    """(inputs, *shape): gradients at one parameter of a layer, from the layer's input and the gradient at its output.

    Linear, convolutional and batch norm layers have formulas, all others use torch.func. A ResNet-18 on 32 images
    takes 2.4 s on one core, 4.5 s without the formula for convolutions and 4.8 s without that for batch norms.
    """
    if isinstance(layer, nn.Linear) and key in ("weight", "bias"):
        x, g = x.reshape(count, -1, layer.in_features), g.reshape(count, -1, layer.out_features)
        return g.mT @ x if key == "weight" else g.sum(1)
    convolution = isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd)
    if convolution and key == "weight":
        return _at_kernels(layer, x, g, count)
    if isinstance(layer, _BatchNorm) and key == "weight":
        assert layer.running_mean is not None
        assert layer.running_var is not None
        g = F.batch_norm(x, layer.running_mean.to(x.dtype), layer.running_var.to(x.dtype), eps=layer.eps).mul_(g)
    if (convolution and key == "bias") or (isinstance(layer, _BatchNorm) and key in ("weight", "bias")):
        return g.reshape(count, -1, g.shape[1], math.prod(g.shape[2:])).sum((1, 3))
    values = {name: _wide(p.detach()) for name, p in layer._parameters.items() if p is not None}
    value = values.pop(key)

    def at_one(x: Tensor, g: Tensor) -> Tensor:
        return vjp(lambda value: functional_call(layer, {**values, key: value}, (x,)), value)[1](g)[0]

    return vmap(at_one)(*(t.reshape(count, -1, *t.shape[1:]) for t in (x, g)))


def _at_kernels(layer: Any, x: Tensor, g: Tensor, count: int) -> Tensor:
    """(inputs, out channels, in channels / groups, *kernel): gradients times the patches that each output saw."""
    if x.ndim != len(layer.kernel_size) + 2:
        raise ValueError(f"a convolution over {tuple(x.shape)}, which has no dimension for inputs")
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode).contiguous()
    first, channel, *steps = x.stride()
    by_kernel = [step * d for step, d in zip(steps, layer.dilation, strict=True)]
    by_place = [step * s for step, s in zip(steps, layer.stride, strict=True)]
    size = (*x.shape[:2], *layer.kernel_size, *g.shape[2:])
    patches = x.as_strided(size, (first, channel, *by_kernel, *by_place))
    patches = patches.reshape(count, len(x) // count, layer.groups, -1, math.prod(g.shape[2:]))
    gradients = g.reshape(count, len(x) // count, layer.groups, layer.out_channels // layer.groups, -1)
    # Several images per input (of a model that folds frames into the batch, say) are further positions of it.
    patches, gradients = (t.movedim(1, -2).flatten(-2) for t in (patches, gradients))
    return (gradients @ patches.mT).reshape(count, *layer.weight.shape)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least; whole numbers are left as they are."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _few(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
