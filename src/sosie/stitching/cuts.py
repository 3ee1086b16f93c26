"""Cutting a model in two at a site: what leads to the activation there, and what follows from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import (
    BadBatch,
    SilentSite,
    Site,
    SiteError,
    UnknownSite,
    answer_in,
    as_found,
    kept_attributes,
    nearest,
    unwrap,
    watch,
)
from ..capture.arguments import CallArguments
from ..capture.restore import evaluating
from ..capture.sites import Names, find_name
from ..capture.structure import activation_in, path_to_tensor, replaced, tensors_in
from ..capture.watch import every_module_called
from ..process_state import full_precision
from .task_graph import TaskGraph, task_graph

# What goes around a cut: information about the input that reaches the answer without passing the site

_SHOWN = 3  # names in an error message


class LeakingCut(SiteError):
    """The answer does not follow from the activation at the site alone."""


def leaking(site: Site, found: Sequence[tuple[str, str]]) -> LeakingCut:
    """The error, from what goes around (in words) and the module that it goes into ("" if that is not known)."""
    ways = [f"{label} goes around it" + (f" into {into}" if into else "") for label, into in found]
    more = f" and {len(ways) - _SHOWN} more" if len(ways) > _SHOWN else ""
    known = f"{'; '.join(ways[:_SHOWN])}{more}" if ways else "no layer's output shows how (a branch, or whole numbers?)"
    where = next((into for _, into in found if into), "")
    advice = f"cut at {where!r}, where they meet, or further up" if where else "cut where all paths have met"
    return LeakingCut(
        f"with the activation at {site.label!r} held fixed, the answer still depends on the input: {known}; {advice}"
    )


def other_content(call: CallArguments) -> CallArguments:
    """The first input that differs from input 0, in one row, with input 0's masks and positions."""
    first = call.inputs(0, 1).named_leaves()
    content = [i for i, (name, leaf) in enumerate(first) if not is_mask(name, leaf)]
    for row in range(1, call.count()):
        leaves = call.inputs(row, row + 1).leaves()
        if any(not _equal(first[i][1], leaves[i]) for i in content):
            mixed = [leaves[i] if i in content else leaf for i, (_, leaf) in enumerate(first)]
            return call.map(lambda *_, rest=iter(mixed): next(rest))
    raise ValueError(f"whether a cut leaks shows on two different inputs; these {call.count()} are all the same")


def is_mask(name: str, leaf: Any) -> bool:
    """Says which tokens count, or where they stand, and not what they are."""
    return isinstance(leaf, Tensor) and (leaf.dtype == torch.bool or name.endswith(("mask", "position_ids")))


def changed_outputs(
    root: nn.Module,
    run: Callable[[Callable[[Any], Any], CallArguments], Any],
    activation: Tensor,
    calls: Sequence[CallArguments],
) -> list[str]:
    """The layers below a site, last first, that the answer is directly made from and that differ between two inputs.

    `run(at_site, call)` is a forward with a function applied to the site's output. Below the site each layer's output
    is cut off from its own inputs, so that a gradient of the answer reaches only what was used as it stands.
    """
    names = Names.of(root)
    seen: list[dict[str, tuple[Tensor, bool]]] = []
    for call in calls:
        outputs: dict[str, Tensor] = {}
        answer = _forward_with_loose_layers(names, run, activation, call, outputs)
        reached: Sequence[Tensor | None] = [None] * len(outputs)
        if answer is not None and answer.requires_grad and outputs:
            with torch.enable_grad():
                total = answer.sum()
            reached = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
        seen.append({name: (outputs[name], grad is not None) for name, grad in zip(outputs, reached, strict=True)})
    one, other = seen
    both = [name for name in one if name in other and one[name][1]]
    return [
        f"the output of {name}" for name in reversed(both) if not _equal(one[name][0].detach(), other[name][0].detach())
    ]


def _forward_with_loose_layers(
    names: Names,
    run: Callable[[Callable[[Any], Any], CallArguments], Any],
    activation: Tensor,
    call: CallArguments,
    outputs: dict[str, Tensor],
) -> Tensor | None:
    below = True

    def at_site(output: Any) -> Any:
        nonlocal below
        below = False
        path = path_to_tensor(output)
        return output if path is None else replaced(output, path, activation.detach().clone())

    def loosen(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def fire(module: nn.Module, args: Any, output: Any) -> Any:
            found = activation_in(output)
            path = path_to_tensor(output)
            if not below or isinstance(found, str) or path is None:
                return None
            outputs[name] = found.detach().requires_grad_()
            return replaced(output, path, outputs[name].clone())  # a clone: the model may go on in place

        return fire

    handles = [names.by_name[name].register_forward_hook(loosen(name)) for name in names.leaves()]
    try:
        with torch.enable_grad():
            return answer_in(run(at_site, call))
    finally:
        for handle in handles:
            handle.remove()


def _equal(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


_EXAMPLES = 3  # inputs of the example on which a cut is tried


class Cut:
    """A model as two maps, input → activation at one site → answer (Csiszárik et al. 2021, section 3.1).

    `Cut(model, "layer2.1", x)` or, with keyword arguments, `Cut(model, "encoder.layer.3", **tokens)`: the example
    is what the model is called with; a few inputs of it are enough. "mix@2" is the second call of a module.

    Above the site the model runs as a graph of its own modules, without anything below. Where its forward cannot be
    traced (it branches on values, say) the whole of it runs with the activation put in its place: below the site on a
    single input, if what comes out is the same, else on all of them. Either way has been compared with the whole
    model when the cut was made. The model is shared, not copied, and left as found; both maps run it in eval mode.
    """

    site: Site

    def __init__(self, model: nn.Module, site: str, /, *args: Any, **kwargs: Any) -> None:
        self._root = unwrap(model)
        names = Names.of(self._root)
        self._name, self._call_number = _one_site(names, site)
        self._module = names.by_name[self._name]
        self._parameters = _positional_names(self._root)
        if not args and not kwargs:
            raise TypeError("a cut is tried on an example of what the model is called with: Cut(model, site, x)")
        with torch.inference_mode(False), as_found(self._root), full_precision():
            example = _several(self._arguments(args, kwargs))
            with watch(self._root, f"{self._name}@{self._call_number}") as seen:
                seen.run(*example.args, **example.kwargs)
            (self.site,) = seen.sites
            (activation,) = seen.values()
            self._overwrites = self._changes_in_place(activation, example)
            self._graph = self._traced(activation, example)
            self._row = example.inputs(0, 1)
            self._one_row = self._graph is None and self._one_row_is_enough(example)

    def representation(self, *args: Any, **kwargs: Any) -> Tensor:
        """The activation at the site. The forward ends all the same: a model may put right at its end what it keeps."""
        found: Tensor | str = ""

        def take(output: Any) -> None:
            nonlocal found
            found = activation_in(output)
            if self._overwrites and isinstance(found, Tensor):
                found = found.clone()

        with self._evaluating():
            self._run(take, CallArguments(args, kwargs))
        if isinstance(found, str):
            raise SiteError(f"site {self.site.label!r} {found}")
        return found

    def task(self, activation: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model's output with this activation at the site; differentiable with respect to it.

        The input, in the structure of the example, is for what the model takes from it besides the activation
        (padding masks, say); most cuts do without.
        """
        with self._evaluating():
            call = self._arguments(args, kwargs)
            if self._graph is not None and self._graph.fits(activation, call):
                return self._graph(activation, call)
            return self._substituted(activation, self._below(call))

    @property
    def needs_input(self) -> bool:
        """Whether `task` must be given the model's input too; where not, nothing below the site is run on it."""
        return bool(self._graph.needs) if self._graph is not None else not self._one_row

    @property
    def example(self) -> CallArguments:
        """One input of what the cut was tried on."""
        return self._row

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise LeakingCut if the answer still depends on the input when the activation is held fixed.

        Tried on two different inputs of this batch, with the padding mask and the positions of the first: these
        belong to both maps.
        """
        with torch.inference_mode(False), as_found(self._root), full_precision():
            call = self._arguments(args, kwargs).map(_copied)
            first, other = call.inputs(0, 1), other_content(call)
            activation = self.representation(*first.args, **first.kwargs)
            if self._graph is not None and self._graph.fits(activation, first):
                if found := self._graph.changed(activation, first, other):
                    raise leaking(self.site, [(around.label, around.into) for around in found])
                return
            answers = [answer_in(self._substituted(activation, each)) for each in (first, other)]
            if not _close(*answers):
                labels = changed_outputs(self._root, self._run, activation, (first, other))
                raise leaking(self.site, [(label, "") for label in labels])

    # How the maps are made

    def _run(self, at_site: Callable[[Any], Any], call: CallArguments) -> Any:
        """The model's forward with a function applied to the site's output; without one it is as it was."""
        calls = 0

        def fire(module: nn.Module, args: Any, output: Any) -> Any:
            nonlocal calls
            calls += 1
            return at_site(output) if calls == self._call_number else None

        with every_module_called(self._root):
            handle = self._module.register_forward_hook(fire)
            try:
                output = self._root(*call.args, **call.kwargs)
            finally:
                handle.remove()
        if calls < self._call_number:
            raise SilentSite(f"the forward of this input did not come by {self.site.label!r}")
        return output

    def _substituted(self, activation: Tensor, call: CallArguments) -> Any:
        given = activation.clone() if self._overwrites else activation
        return self._run(lambda output: _with_activation(output, given), call)

    def _below(self, call: CallArguments) -> CallArguments:
        """What the part below the site is run on, where it is run at all."""
        given = bool(call.args or call.kwargs)
        if self._one_row and not _has_masks(call):
            return call.inputs(0, 1) if given else self._row
        if not given:
            raise TypeError(
                f"the task map from {self.site.label!r} runs the model's whole forward: give its input too, "
                "task(activation, x)"
            )
        return call

    def _changes_in_place(self, activation: Tensor, call: CallArguments) -> bool:
        given = activation.clone()
        self._run(lambda output: _with_activation(output, given), call)
        return given._version > 0

    def _traced(self, activation: Tensor, example: CallArguments) -> TaskGraph | None:
        try:
            with kept_attributes(self._root):
                graph = task_graph(self._root, (self._name, self._call_number), activation.clone(), example)
            right = all(self._agrees(graph, call) for call in (example, example.inputs(0, example.count() - 1)))
        except Exception:  # a forward that cannot be traced may fail in any way, and there is another
            return None
        return graph if right else None

    def _agrees(self, task: Callable[[Tensor, CallArguments], Any], call: CallArguments) -> bool:
        """Whether a task map gives what the whole forward gives, with its own activations and with others'."""
        activation = self.representation(*call.args, **call.kwargs)
        for given in (activation, activation.flip(0)):
            expected = self._substituted(given, call)
            turned = call.map(lambda _, leaf: leaf.flip(0) if isinstance(leaf, Tensor) else leaf)
            self._root(*turned.args, **turned.kwargs)  # so that nothing a module remembers is this input's
            if not _same_outputs(task(given, call), expected):
                return False
        return True

    def _one_row_is_enough(self, example: CallArguments) -> bool:
        whole = self._root(*example.args, **example.kwargs)
        activation = self.representation(*example.args, **example.kwargs)
        if not _same_outputs(self._substituted(activation, example), whole):
            raise SiteError(f"two forwards of one input differ above {self.site.label!r}: the model is random in eval")
        if _has_masks(example):
            return False  # each input has its own
        rows = [example.inputs(i, i + 1) for i in (0, example.count() - 1)]
        try:
            with kept_attributes(self._root):
                return all(_same_outputs(self._substituted(activation, row), whole) for row in rows)
        except Exception:  # a forward that remembers how many inputs it began with
            return False

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        return CallArguments(args, kwargs, self._parameters)

    def _evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self._root) if self._root.training else nullcontext()

    def __repr__(self) -> str:
        how = "a graph" if self._graph is not None else "the whole forward"
        return f"<Cut of {type(self._root).__name__} at {self.site.label}: task map by {how}>"


def _one_site(names: Names, text: str) -> tuple[str, int]:
    if not isinstance(text, str):
        raise UnknownSite(f"a cut is at one site, named as in a list of sites; got {text!r}")
    found = find_name(names, text)
    if found is None:
        raise UnknownSite(f"no module is called {text!r}{nearest(text.partition('@')[0], names.by_name)}")
    return found[0], found[1] or 1


def _positional_names(root: nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, each in inspect.signature(root.forward).parameters.items() if each.kind in kinds)


def _several(call: CallArguments) -> CallArguments:
    """A few of the inputs, at least two: a single one is doubled."""
    count = call.count()
    if count == 0:
        raise BadBatch("an example without inputs: give at least one")
    few = call.inputs(0, min(count, _EXAMPLES)).map(_copied)
    return (
        few if count > 1 else few.map(lambda _, leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf * 2)
    )


def _has_masks(call: CallArguments) -> bool:
    return any(is_mask(name, leaf) for name, leaf in call.named_leaves())


def _copied(name: str, leaf: Any) -> Any:
    """A model may change its input in place, and what was made in inference mode cannot enter autograd."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _with_activation(output: Any, activation: Tensor) -> Any:
    path = path_to_tensor(output)
    if path is None:
        raise SiteError(f"the site {activation_in(output)}: nothing can be put in its place")
    return replaced(output, path, activation)


def _same_outputs(found: Any, expected: Any) -> bool:
    ours, theirs = tensors_in(found), tensors_in(expected)
    return type(found) is type(expected) and len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(found: Tensor | None, expected: Tensor | None) -> bool:
    """Equal up to what the order of a sum may change, measured by the largest entry."""
    if found is None or expected is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if torch.equal(found, expected) or not found.is_floating_point():
        return torch.equal(found, expected)
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    tolerance = largest * torch.finfo(found.dtype).eps ** 0.5
    return torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)
