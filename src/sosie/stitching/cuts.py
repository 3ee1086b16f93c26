"""Cutting a model in two at a site: what leads to the activation there, and what follows from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..capture import nearest
from ..capture.batches import CallArguments, Chunk, count_inputs
from ..capture.calls import is_mask, run_changed
from ..capture.restore import as_found, evaluating, every_module_called, kept_attributes, state_of
from ..capture.rows import TokenMasks, token_mask
from ..capture.sites import (
    Names,
    Site,
    SiteError,
    Watch,
    activation_in,
    ancestors,
    answer_in,
    find_name,
    fresh_leaf,
    path_to_tensor,
    replaced,
    tensors_in,
    unwrap,
    watch,
)
from ..checks import listed
from ..engine.network import Network
from ..process_state import full_precision

_EXAMPLES = 3  # inputs of the example on which a cut is tried


class LeakingCut(SiteError):
    """Raised when the answer does not follow from the activation at the site alone."""


class Cut:
    """A model as two maps, input → activation at one site → answer (Csiszárik et al. 2021, section 3.1).

    Write `Cut(model, "layer2.1", x)` or, with keyword arguments, `Cut(model, "encoder.layer.3", **tokens)`. The example
    is what the model is called with; a few inputs are enough. "mix@2" is the second call of a module.

    Above the site the model's own forward runs. Modules below it are replayed: they return what they returned for the
    first input of the example, and compute nothing. When the cut is made, its output is compared with that of the whole
    forward. Where they differ, because something below the site bypasses it, the whole forward runs with the activation
    replaced. The model is shared, not copied, and left as found; both maps run it in eval mode.
    """

    site: Site
    example: CallArguments  # one input

    def __init__(self, model: nn.Module, site: str, /, *args: Any, **kwargs: Any) -> None:
        self._root = unwrap(model)
        names = Names.of(self._root)
        if not isinstance(site, str):
            raise SiteError(f"a cut is made at one site, given by its name, got {site!r}")
        match = find_name(names, site)
        if match is None:
            raise SiteError(f"no module is called {site!r}{nearest(site.partition('@')[0], names.by_name)}")
        self._name, self._call_number = match[0], match[1] or 1
        self._module = names.by_name[self._name]
        aliases = [name for name, module in names.by_name.items() if module is self._module]
        self._parents = {names.by_name[parent] for name in aliases for parent in ancestors(name)}
        others = (m for m in names.unique().values() if m not in self._parents)
        self._others = [m for m in others if not isinstance(m, torch.jit.ScriptModule)]  # they take no hooks
        parameters = inspect.signature(self._root.forward).parameters.values()
        self._parameters = tuple(p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD)
        if not args and not kwargs:
            raise TypeError("a cut needs an example of the model's input: Cut(model, site, x)")
        with torch.inference_mode(False), as_found(self._root), kept_attributes(self._root), full_precision():
            example = _few(CallArguments(args, kwargs, self._parameters))
            with watch(self._root, f"{self._name}@{self._call_number}") as seen:
                seen.run(*example.args, **example.kwargs)
            (self.site,) = seen.sites
            (activation,) = seen.values()
            self._dtype = activation.dtype
            self._overwrites = False  # whether layers above the site change its activation in place
            copied = activation.clone()
            self._substituted(copied, example)
            self._overwrites = copied._version > 0
            self.example = example.inputs(0, 1)
            self._outputs = self._outputs_up_to_site()
            self._leaves_marks = False  # whether a forward changes attributes of the site's parents
            self._replays = self._can_replay(example)

    def representation(self, *args: Any, **kwargs: Any) -> Tensor:
        """The activation at the site. The forward runs to its end, since a model may update its state there."""
        activation: Tensor | str = ""

        def take(output: Any) -> None:
            nonlocal activation
            activation = activation_in(output)
            if self._overwrites and isinstance(activation, Tensor):
                activation = activation.clone()

        with self._evaluating():
            self._run(take, CallArguments(args, kwargs))
        if isinstance(activation, str):
            raise SiteError(f"site {self.site.label!r} {activation}")
        return activation

    def task(self, activation: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model's output with this activation at the site, differentiable with respect to it.

        The input, in the structure of the example, supplies what the model needs besides the activation, such as
        padding masks; most cuts do not need it.
        """
        call = CallArguments(args, kwargs, self._parameters)
        has_input = bool(args or kwargs)
        fits = activation.shape[1:] == self.site.shape and (not has_input or call.form() == self.example.form())
        with self._evaluating():
            if self._replays and fits and (has_input or not self.needs_input):
                with kept_attributes(self._root) if self._leaves_marks else nullcontext():
                    return self._run_above(activation, call)
            if not has_input:
                raise TypeError(
                    f"the task map from {self.site.label!r} needs the model's input besides the activation: "
                    "task(activation, x)"
                )
            return self._substituted(activation, call)

    @property
    def needs_input(self) -> bool:
        """True if `task` needs the model's input too."""
        return not self._replays or _has_masks(self.example)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise LeakingCut if the answer still depends on the input when the activation is held fixed.

        Two different inputs of this batch are tried, both with the padding mask and the positions of the first.
        """
        with torch.inference_mode(False), as_found(self._root), kept_attributes(self._root), full_precision():
            call = CallArguments(args, kwargs, self._parameters).map(_copied)
            leaks, bypasses = self._leaks(call)
            if not leaks:
                return
            where = self._meeting_place(call)
        paths = listed((f"{label} goes around it" for label in bypasses), 3, "; ")
        paths = paths or "no layer's output shows how (a branch, or integers?)"
        advice = f"cut at {where!r}, where they meet, or further up" if where else "cut where all paths have met"
        raise LeakingCut(
            f"with the activation at {self.site.label!r} held fixed, the answer still depends on the input: "
            f"{paths}; {advice}"
        )

    def __repr__(self) -> str:
        how = "the modules above" if self._replays else "the whole forward"
        return f"<Cut of {type(self._root).__name__} at {self.site.label}: task map by {how}>"

    # How the maps are made

    def _run(self, at_site: Callable[[Any], Any], call: CallArguments) -> Any:
        """Run the model with a function applied to the site's output; where it returns None, nothing changes."""
        return run_changed(self._root, self._module, self._call_number, at_site, call.args, call.kwargs)

    def _substituted(self, activation: Tensor, call: CallArguments) -> Any:
        """The output of the whole forward with the site's activation replaced by this one."""
        activation = activation.clone() if self._overwrites else activation

        def put(output: Any) -> Any:
            path = path_to_tensor(output)
            if path is None:
                raise SiteError(f"the site {activation_in(output)}, so its activation cannot be replaced")
            return replaced(output, path, activation)

        return self._run(put, call)

    def _outputs_up_to_site(self) -> list[tuple[nn.Module, Any]]:
        """The outputs of modules for the example, in the order of their calls, the site last.

        A module that runs inside another of these is left out.
        """
        outputs: list[tuple[nn.Module, Any]] = []
        depth = 0

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal depth
            depth += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal depth
            depth -= 1
            calls = sum(called is self._module for called, _ in outputs)
            if not depth and calls < self._call_number:
                outputs.append((module, output))

        with ExitStack() as stack:
            for module in self._others:
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            with every_module_called(self._root):
                self._root(*self.example.args, **self.example.kwargs)
        while outputs and outputs[-1][0] is not self._module:
            outputs.pop()
        return outputs

    def _run_above(self, activation: Tensor, call: CallArguments) -> Any:
        """The output with modules below the site replayed; of the call only masks are used, if it has any."""
        recorded = list(self._outputs)

        def as_many(part: Any) -> Any:
            """Expand the record of one input to all inputs, on the device and in the precision of the activation."""
            if not isinstance(part, Tensor):
                return part
            part = part.to(activation.device, activation.dtype if part.dtype == self._dtype else part.dtype)
            return part.expand(len(activation), *part.shape[1:]) if part.ndim and len(part) == 1 else part

        def instead_of(module: nn.Module) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not recorded:
                    return module._call_impl(*args, **kwargs)
                expected, output = recorded.pop(0)
                if expected is not module:
                    raise RuntimeError(f"below {self.site.label!r} the forward takes a different path than before")
                output = tree_map(as_many, output)
                if recorded:
                    return output
                last = activation.clone() if self._overwrites else activation
                return replaced(output, path_to_tensor(output) or (), last)

            return run

        if not _has_masks(self.example):
            call = self.example.map(lambda _, x: as_many(x) if isinstance(x, Tensor) else x * len(activation))
        with every_module_called(self._root), ExitStack() as stack:
            for module in dict.fromkeys(module for module, _ in recorded):
                stack.enter_context(_called_instead(module, instead_of(module)))
            # Without the model's own hooks, which are meant for whole forwards.
            forward = self._root if self._root is self._module else self._root.forward
            return forward(*call.args, **call.kwargs)

    def _can_replay(self, example: CallArguments) -> bool:
        """True if replaying gives the output of the whole forward, for other activations, inputs and masks too."""

        def represented(call: CallArguments) -> Tensor:
            call = call.map(_copied)
            return self.representation(*call.args, **call.kwargs)

        def is_same(call: CallArguments) -> bool:
            representation = represented(call)
            flipped = call.map(lambda _, leaf: leaf.flip(0) if isinstance(leaf, Tensor) else leaf)
            for activation in (representation, representation.flip(0)):
                expected = self._substituted(activation, call.map(_copied))
                self._root(*flipped.args, **flipped.kwargs)  # so that no module remembers anything of this input
                with kept_attributes(self._root):
                    before = state_of(self._parents)
                    output = self._run_above(activation, call.map(_copied))
                    self._leaves_marks |= state_of(self._parents) != before
                if not _same_outputs(output, expected):
                    return False
            return True

        calls = [example, example.inputs(0, example.count() - 1)]
        if _has_masks(example):
            calls.append(example.map(_other_mask))
        with suppress(Exception):  # a forward that cannot be replayed may fail in any way
            if all(map(is_same, calls)):
                return True
        again = self._substituted(represented(example), example.map(_copied))
        whole = self._root(*example.args, **example.kwargs)
        if not _same_outputs(again, whole):
            raise SiteError(f"two forwards of one input differ above {self.site.label!r}: the model is random in eval")
        return False

    def _leaks(self, call: CallArguments) -> tuple[bool, list[str]]:
        """Return whether the answer depends on more than the activation, and the tensors that bypass it, last first.

        These are arguments of the model and outputs of modules below the site from which the answer is directly made
        and which differ between two inputs. Each is detached, so that the gradient of the answer reaches only what is
        used directly.
        """
        names = Names.of(self._root)
        first, second = call.inputs(0, 1), other_content(call)
        activation = self.representation(*first.args, **first.kwargs).detach()
        parts: list[tuple[str, Tensor]] = []
        below = True

        def argument(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            leaf = leaf.detach().requires_grad_()
            parts.append((f"the model's argument {name}" if name else "the model's input", leaf))
            return leaf.clone()

        def fire(module: nn.Module, args: Any, output: Any) -> Any:
            leaf = fresh_leaf(output, anew=True) if below and isinstance(activation_in(output), Tensor) else None
            if leaf is None:
                return None
            parts.append((f"the output of {names.first[id(module)]}", leaf[0]))
            return leaf[1]

        def at_site(output: Any) -> Any:
            nonlocal below
            below = False
            path = path_to_tensor(output)
            return output if path is None else replaced(output, path, activation.clone())

        runs: list[tuple[Tensor | None, list[tuple[str, Tensor]]]] = []
        handles = [module.register_forward_hook(fire) for module in self._others]
        try:
            for inputs in (first, second):
                parts, below = [], True
                with torch.enable_grad():
                    runs.append((answer_in(self._run(at_site, inputs.map(argument))), parts))
        finally:
            for handle in handles:
                handle.remove()
        (answer, parts), (second_answer, second_parts) = runs
        gradients: list[Tensor | None] = [None] * len(parts)
        if answer is not None and answer.requires_grad and parts:
            leaves = [leaf for _, leaf in parts]
            gradients = list(torch.autograd.grad(answer, leaves, torch.ones_like(answer), allow_unused=True))
        bypasses = [
            label
            for (label, leaf), (_, second_leaf), gradient in zip(parts, second_parts, gradients, strict=False)
            if gradient is not None and not _equal(leaf.detach(), second_leaf.detach())
        ]
        return bool(bypasses) or not _close(answer, second_answer), list(dict.fromkeys(reversed(bypasses)))

    def _meeting_place(self, call: CallArguments) -> str:
        """The innermost module around the site that nothing bypasses; "" if there is none."""
        for name in reversed(ancestors(self._name)[1:]):
            try:
                if not Cut(self._root, name, *call.args, **call.kwargs)._leaks(call)[0]:
                    return name
            except SiteError:  # a list of modules, which is never called itself
                continue
        return ""

    def _evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self._root) if self._root.training else nullcontext()


@contextmanager
def _called_instead(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of a module, by the attribute that `module.compile()` sets; its hooks do not fire."""
    attributes = vars(module)
    before = {key: attributes[key] for key in ("_compiled_call_impl",) if key in attributes}
    attributes["_compiled_call_impl"] = function
    try:
        yield
    finally:
        del attributes["_compiled_call_impl"]
        attributes.update(before)


def _few(call: CallArguments) -> CallArguments:
    """The first few inputs, at least two: a single one is doubled."""
    count = call.count()
    if count == 0:
        raise ValueError("the example has no inputs: give at least one")
    few = call.inputs(0, min(count, _EXAMPLES)).map(_copied)
    if count > 1:
        return few
    return few.map(lambda _, leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf * 2)


def other_content(call: CallArguments) -> CallArguments:
    """The first input that differs from input 0, in one row, with input 0's masks and positions."""
    first = call.inputs(0, 1).named_leaves()
    content = [i for i, (name, leaf) in enumerate(first) if not is_mask(name, leaf)]
    for row in range(1, call.count()):
        leaves = call.inputs(row, row + 1).leaves()
        if any(not _equal(first[i][1], leaves[i]) for i in content):
            mixed = [leaves[i] if i in content else leaf for i, (_, leaf) in enumerate(first)]
            return call.map(lambda *_, rest=iter(mixed): next(rest))
    raise ValueError(f"two different inputs are needed to see whether a cut leaks; these {call.count()} are all equal")


def _has_masks(call: CallArguments) -> bool:
    return any(is_mask(name, leaf) for name, leaf in call.named_leaves())


def _other_mask(name: str, leaf: Any) -> Any:
    """The first input with different padding, or its positions in reverse order."""
    if not is_mask(name, leaf):
        return leaf
    if name.endswith("position_ids"):
        return leaf.flip(-1)
    leaf = leaf.clone()
    leaf[0, ..., -1] = 0
    return leaf


def _copied(name: str, leaf: Any) -> Any:
    """A copy: a model may change its input in place, and tensors made in inference mode cannot enter autograd."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _same_outputs(first: Any, second: Any) -> bool:
    x, y = tensors_in(first), tensors_in(second)
    return type(first) is type(second) and len(x) == len(y) and all(map(_close, x, y))


def _close(x: Tensor | None, y: Tensor | None) -> bool:
    """True if equal up to what the order of a sum may change, relative to the largest entry."""
    if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
        return False
    if torch.equal(x, y) or not x.is_floating_point():
        return torch.equal(x, y)
    largest = y[y.isfinite()].abs().max().item() if y.isfinite().any() else 0.0
    return torch.allclose(x, y, rtol=0, atol=largest * torch.finfo(x.dtype).eps ** 0.5, equal_nan=True)


def _equal(first: Any, second: Any) -> bool:
    x, y = tensors_in(first), tensors_in(second)
    if not x:
        return bool(first == second)
    return len(x) == len(y) and all(map(torch.equal, x, y))


# One network of a stitch: a model with its preparation of inputs, and its cut


def answer_of(output: Any) -> Tensor:
    answer = answer_in(output)
    if answer is None:
        raise TypeError(f"the network must answer with a tensor, got {type(output).__name__}")
    return answer


@dataclass
class CutModel(Network):
    """One of the two networks, cut at a site."""

    cut: Cut = field(init=False, repr=False)  # from `cut_at`

    def cut_at(self, site: str, batch: Any, *, check: bool = False) -> CutModel:
        """Return this network cut at a site; the cut is tried on a batch. `check`: raise if something bypasses it."""
        args, kwargs = self.call(batch)
        model = replace(self)
        model.cut = Cut(self.model, site, *args, **kwargs)
        if check:
            model.cut.check(*args, **kwargs)
        return model

    def call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments for a batch, on its device."""
        return self.arguments(Chunk(batch, 0, count_inputs(batch)))

    def answer(self, batch: Any) -> Tensor:
        return self.outputs(Chunk(batch, 0, count_inputs(batch)))

    def representation(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The activation at the cut, and which of its tokens (inputs, tokens) are not padding; None: all of them."""
        args, kwargs = self.call(batch)
        activation = self.cut.representation(*args, **kwargs)
        return activation, _no_padding(self.masks(batch, args, kwargs), activation, self.cut.site)

    def run(self, batch: Any, seen: Watch, sites: Sequence[Site]) -> tuple[Any, list[Tensor], list[Tensor | None]]:
        """The output for a batch, the activation at every watched site, and which of its tokens are not padding."""
        args, kwargs = self.call(batch)
        output = unwrap(self.model)(*args, **kwargs)
        activations = [seen[site.label] for site in sites]
        masks = self.masks(batch, args, kwargs)
        padding = [_no_padding(masks, x, site) for x, site in zip(activations, sites, strict=True)]
        return output, activations, padding

    def mixing_at(self, sites: Sequence[Site], batch: Any) -> str | None:
        """The caveat that inputs of a batch are mixed on the way to these sites; None if they are not."""
        with replace(self, sites=[site.label for site in sites]).opened() as network:
            return network.mixing(batch)


def _no_padding(masks: TokenMasks, activation: Tensor, site: Site) -> Tensor | None:
    mask = masks.at(site, activation)
    return None if mask is None or activation.ndim != 3 else token_mask(mask, "positions", activation, site=site)
