"""Squares of gradients input by input, summed over inputs, at any parameters of any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from ..process_state import full_precision, products
from .arguments import CallArguments
from .batches import Chunk
from .layer_gradients import Rule, Use, each_gradient, inputs_at_a_time, rules_of, sum_of_squares
from .names import unwrap
from .outputs import answer_in
from .structure import cut
from .watch import every_module_called

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
                    found[name] = _wide(each_gradient(uses, 0, count, count))
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
        expected = [_wide(known.get(name, torch.zeros_like(self._parameters[name]))) for name in names]
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


def _wide(gradient: Tensor) -> Tensor:
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
