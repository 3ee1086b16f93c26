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
from ..capture.structure import activation_in, fresh_leaf, path_to_tensor, replaced, tensors_in
from ..capture.watch import every_module_called
from ..process_state import full_precision
from .task_graph import TaskGraph, task_graph

_EXAMPLES = 3  # inputs of the example on which a cut is tried
_SHOWN = 3  # names in an error message


class LeakingCut(SiteError):
    """The answer does not follow from the activation at the site alone."""


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
        place = find_name(names, site) if isinstance(site, str) else None
        if place is None:
            hint = "; a cut is at one site, given by its name"
            hint = nearest(site.partition("@")[0], names.by_name) if isinstance(site, str) else hint
            raise UnknownSite(f"no module is called {site!r}{hint}")
        self._name, self._call_number = place[0], place[1] or 1
        self._module = names.by_name[self._name]
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(self._root.forward).parameters
        self._parameters = tuple(name for name, each in parameters.items() if each.kind in kinds)
        if not args and not kwargs:
            raise TypeError("a cut is tried on an example of what the model is called with: Cut(model, site, x)")
        with torch.inference_mode(False), as_found(self._root), kept_attributes(self._root), full_precision():
            example = _few(CallArguments(args, kwargs, self._parameters))
            with watch(self._root, f"{self._name}@{self._call_number}") as seen:
                seen.run(*example.args, **example.kwargs)
            (self.site,) = seen.sites
            (activation,) = seen.values()
            self._overwrites = False  # what comes after the site changes its activation in place
            given = activation.clone()
            self._substituted(given, example)
            self._overwrites = given._version > 0
            self._graph = self._traced(activation, example)
            self._row = example.inputs(0, 1)
            self._one_row = self._graph is None and self._one_row_is_enough(example)

    def representation(self, *args: Any, **kwargs: Any) -> Tensor:
        """The activation at the site. The forward ends all the same: a model may put right at its end what it keeps."""
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
        """The model's output with this activation at the site; differentiable with respect to it.

        The input, in the structure of the example, is for what the model takes from it besides the activation
        (padding masks, say); most cuts do without.
        """
        call = CallArguments(args, kwargs, self._parameters)
        with self._evaluating():
            if self._graph is not None and self._graph.fits(activation, call):
                return self._graph(activation, call)
            if self._one_row and not _has_masks(call):
                call = call.inputs(0, 1) if args or kwargs else self._row
            elif not args and not kwargs:
                raise TypeError(
                    f"the task map from {self.site.label!r} runs the model's whole forward: give its input too, "
                    "task(activation, x)"
                )
            return self._substituted(activation, call)

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
        with torch.inference_mode(False), as_found(self._root), kept_attributes(self._root), full_precision():
            call = CallArguments(args, kwargs, self._parameters).map(_copied)
            first, other = call.inputs(0, 1), other_content(call)
            activation = self.representation(*first.args, **first.kwargs)
            around: list[tuple[str, str]] = []  # what goes around the site, and the module that it goes into
            if self._graph is not None and self._graph.fits(activation, first):
                around = self._graph.changed(activation, first, other)
                if not around:
                    return
            else:
                answers = [answer_in(self._substituted(activation, each)) for each in (first, other)]
                if _close(*answers):
                    return
                around = [(name, "") for name in self._changed_outputs(activation, (first, other))]
        ways = [f"{label} goes around it" + (f" into {into}" if into else "") for label, into in around]
        more = f" and {len(ways) - _SHOWN} more" if len(ways) > _SHOWN else ""
        known = "; ".join(ways[:_SHOWN]) + more or "no layer's output shows how (a branch, or whole numbers?)"
        where = next((into for _, into in around if into), "")
        advice = f"cut at {where!r}, where they meet, or further up" if where else "cut where all paths have met"
        raise LeakingCut(
            f"with the activation at {self.site.label!r} held fixed, the answer still depends on the input: {known}; "
            f"{advice}"
        )

    def __repr__(self) -> str:
        how = "a graph" if self._graph is not None else "the whole forward"
        return f"<Cut of {type(self._root).__name__} at {self.site.label}: task map by {how}>"

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
            raise SilentSite(f"the forward of this input did not reach {self.site.label!r}")
        return output

    def _substituted(self, activation: Tensor, call: CallArguments) -> Any:
        """The whole forward with an activation put in its place."""
        given = activation.clone() if self._overwrites else activation

        def put(output: Any) -> Any:
            path = path_to_tensor(output)
            if path is None:
                raise SiteError(f"the site {activation_in(output)}: nothing can be put in its place")
            return replaced(output, path, given)

        return self._run(put, call)

    def _traced(self, activation: Tensor, example: CallArguments) -> TaskGraph | None:
        """The graph of what comes after the site, if it gives what the whole forward gives."""
        try:
            with kept_attributes(self._root):
                graph = task_graph(self._root, (self._name, self._call_number), activation.clone(), example)
            for call in (example, example.inputs(0, example.count() - 1)):
                activation = self.representation(*call.args, **call.kwargs)
                for given in (activation, activation.flip(0)):
                    expected = self._substituted(given, call)
                    turned = call.map(lambda _, leaf: leaf.flip(0) if isinstance(leaf, Tensor) else leaf)
                    self._root(*turned.args, **turned.kwargs)  # so that nothing a module remembers is this input's
                    if not _same_outputs(graph(given, call), expected):
                        return None
        except Exception:  # a forward that cannot be traced may fail in any way, and there is another
            return None
        return graph

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

    def _changed_outputs(self, activation: Tensor, calls: Sequence[CallArguments]) -> list[str]:
        """The layers below the site, last first, that the answer is directly made from and that differ between calls.

        Below the site each layer's output is cut off from its own inputs, so that a gradient of the answer reaches only
        what was used as it stands.
        """
        names = Names.of(self._root)
        below = True
        outputs: dict[str, Tensor] = {}

        def at_site(output: Any) -> Any:
            nonlocal below
            below = False
            path = path_to_tensor(output)
            return output if path is None else replaced(output, path, activation.detach().clone())

        def loosen(name: str) -> Callable[[nn.Module, Any, Any], Any]:
            def fire(module: nn.Module, args: Any, output: Any) -> Any:
                leaf = fresh_leaf(output, anew=True) if below and isinstance(activation_in(output), Tensor) else None
                if leaf is None:
                    return None
                outputs[name] = leaf[0]
                return leaf[1]

            return fire

        seen: list[dict[str, Tensor]] = []
        used: list[str] = []  # by the answer to the first call
        handles = [names.by_name[name].register_forward_hook(loosen(name)) for name in names.leaves()]
        try:
            for call in calls:
                outputs, below = {}, True
                with torch.enable_grad():
                    answer = answer_in(self._run(at_site, call))
                    if not seen and answer is not None and answer.requires_grad and outputs:
                        reached = torch.autograd.grad(answer.sum(), list(outputs.values()), allow_unused=True)
                        used = [name for name, grad in zip(outputs, reached, strict=True) if grad is not None]
                seen.append(outputs)
        finally:
            for handle in handles:
                handle.remove()
        one, other = seen
        differ = [name for name in used if name in other and not _equal(one[name].detach(), other[name].detach())]
        return [f"the output of {name}" for name in reversed(differ)]

    def _evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self._root) if self._root.training else nullcontext()


def _few(call: CallArguments) -> CallArguments:
    """A few of the inputs, at least two: a single one is doubled."""
    count = call.count()
    if count == 0:
        raise BadBatch("an example without inputs: give at least one")
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
    raise ValueError(f"whether a cut leaks shows on two different inputs; these {call.count()} are all the same")


def is_mask(name: str, leaf: Any) -> bool:
    """Says which tokens count, or where they stand, and not what they are."""
    return isinstance(leaf, Tensor) and (leaf.dtype == torch.bool or name.endswith(("mask", "position_ids")))


def _has_masks(call: CallArguments) -> bool:
    return any(is_mask(name, leaf) for name, leaf in call.named_leaves())


def _copied(name: str, leaf: Any) -> Any:
    """A model may change its input in place, and what was made in inference mode cannot enter autograd."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _equal(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def _same_outputs(ours: Any, theirs: Any) -> bool:
    one, other = tensors_in(ours), tensors_in(theirs)
    return type(ours) is type(theirs) and len(one) == len(other) and all(map(_close, one, other))


def _close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal up to what the order of a sum may change, measured by the largest entry."""
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if torch.equal(ours, theirs) or not ours.is_floating_point():
        return torch.equal(ours, theirs)
    largest = theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 0.0
    return torch.allclose(ours, theirs, rtol=0, atol=largest * torch.finfo(ours.dtype).eps ** 0.5, equal_nan=True)
