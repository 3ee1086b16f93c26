"""Cutting a model in two at a site: what leads to the activation there, and what follows from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..capture import (
    Chunk,
    Masks,
    Site,
    SiteError,
    Watch,
    answer_in,
    as_found,
    count_inputs,
    kept_attributes,
    nearest,
    unwrap,
    watch,
)
from ..capture.batches import CallArguments
from ..capture.restore import evaluating, every_module_called
from ..capture.rows import token_mask
from ..capture.sites import (
    Names,
    activation_in,
    ancestors,
    find_name,
    fresh_leaf,
    path_to_tensor,
    replaced,
    run_changed,
    tensors_in,
)
from ..engine.network import Network
from ..process_state import full_precision

_EXAMPLES = 3  # inputs of the example on which a cut is tried
_SHOWN = 3  # names in an error message


class LeakingCut(SiteError):
    """The answer does not follow from the activation at the site alone."""


class Cut:
    """A model as two maps, input → activation at one site → answer (Csiszárik et al. 2021, section 3.1).

    `Cut(model, "layer2.1", x)` or, with keyword arguments, `Cut(model, "encoder.layer.3", **tokens)`: the example
    is what the model is called with; a few inputs of it are enough. "mix@2" is the second call of a module.

    From the activation on, the model's own forward runs, while modules below the site stand still: they return what
    they returned for the first input of the example, and compute nothing. When the cut is made, its output is compared
    with that of the whole forward; where it differs, because something below the site goes around it, the whole
    forward runs with the activation put in its place. The model is shared, not copied, and left as found; both maps run
    it in eval mode.
    """

    site: Site
    example: CallArguments  # of one input

    def __init__(self, model: nn.Module, site: str, /, *args: Any, **kwargs: Any) -> None:
        self._root = unwrap(model)
        names = Names.of(self._root)
        if not isinstance(site, str):
            raise SiteError(f"a cut is at one site, given by its name, got {site!r}")
        place = find_name(names, site)
        if place is None:
            raise SiteError(f"no module is called {site!r}{nearest(site.partition('@')[0], names.by_name)}")
        self._name, self._call_number = place[0], place[1] or 1
        self._module = names.by_name[self._name]
        own = [name for name, module in names.by_name.items() if module is self._module]
        self._around = {names.by_name[each] for name in own for each in ancestors(name)}  # modules that the site is in
        others = (m for m in names.unique().values() if m not in self._around)
        self._others = [m for m in others if not isinstance(m, torch.jit.ScriptModule)]  # they take no hooks
        parameters = inspect.signature(self._root.forward).parameters.values()
        self._parameters = tuple(each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD)
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
            given = activation.clone()
            self._substituted(given, example)
            self._overwrites = given._version > 0
            self.example = example.inputs(0, 1)
            self._outputs = self._outputs_up_to_site()
            self._leaves_marks = False  # whether a forward changes attributes of modules that the site is in
            self._stands_still = self._may_stand_still(example)

    def representation(self, *args: Any, **kwargs: Any) -> Tensor:
        """The activation at the site. The forward still runs to its end, where a model may update what it keeps."""
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

        The input, in the structure of the example, supplies what the model needs besides the activation (padding
        masks, say); most cuts do not need it.
        """
        call = CallArguments(args, kwargs, self._parameters)
        given = bool(args or kwargs)
        fits = activation.shape[1:] == self.site.shape and (not given or call.form() == self.example.form())
        with self._evaluating():
            if self._stands_still and fits and (given or not self.needs_input):
                with kept_attributes(self._root) if self._leaves_marks else nullcontext():
                    return self._run_above(activation, call)
            if not given:
                raise TypeError(
                    f"the task map from {self.site.label!r} needs the model's input besides the activation: "
                    "task(activation, x)"
                )
            return self._substituted(activation, call)

    @property
    def needs_input(self) -> bool:
        """Whether `task` needs the model's input too."""
        return not self._stands_still or _has_masks(self.example)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise LeakingCut if the answer still depends on the input when the activation is held fixed.

        Two different inputs of this batch are tried, both with the padding mask and the positions of the first, which
        belong to both maps.
        """
        with torch.inference_mode(False), as_found(self._root), kept_attributes(self._root), full_precision():
            call = CallArguments(args, kwargs, self._parameters).map(_copied)
            leaks, around = self._leaks(call)
            if not leaks:
                return
            where = self._meeting_place(call)
        more = f" and {len(around) - _SHOWN} more" if len(around) > _SHOWN else ""
        no_way = "no layer's output shows how (a branch, or whole numbers?)"
        ways = "; ".join(f"{label} goes around it" for label in around[:_SHOWN]) + more
        advice = f"cut at {where!r}, where they meet, or further up" if where else "cut where all paths have met"
        raise LeakingCut(
            f"with the activation at {self.site.label!r} held fixed, the answer still depends on the input: "
            f"{ways or no_way}; {advice}"
        )

    def __repr__(self) -> str:
        how = "what follows" if self._stands_still else "the whole forward"
        return f"<Cut of {type(self._root).__name__} at {self.site.label}: task map by {how}>"

    # How the maps are made

    def _run(self, at_site: Callable[[Any], Any], call: CallArguments) -> Any:
        """The model's forward with a function applied to the site's output; where it returns None, nothing changes."""
        return run_changed(self._root, self._module, self._call_number, at_site, call.args, call.kwargs)

    def _substituted(self, activation: Tensor, call: CallArguments) -> Any:
        """The output of the whole forward with this activation put in its place."""
        given = activation.clone() if self._overwrites else activation

        def put(output: Any) -> Any:
            path = path_to_tensor(output)
            if path is None:
                raise SiteError(f"the site {activation_in(output)}: no other activation can be put in its place")
            return replaced(output, path, given)

        return self._run(put, call)

    def _outputs_up_to_site(self) -> list[tuple[nn.Module, Any]]:
        """What modules return for the example, in the order of their calls, the site last.

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
            calls = sum(each is self._module for each, _ in outputs)
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
        """The output with modules below the site standing still; of the call only masks are used, if it has any."""
        waiting = list(self._outputs)

        def as_many(part: Any) -> Any:
            """What was recorded of one input, for all of them, where and in the precision that the activation has."""
            if not isinstance(part, Tensor):
                return part
            part = part.to(activation.device, activation.dtype if part.dtype == self._dtype else part.dtype)
            return part.expand(len(activation), *part.shape[1:]) if part.ndim and len(part) == 1 else part

        def instead_of(module: nn.Module) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not waiting:
                    return module._call_impl(*args, **kwargs)
                expected, output = waiting.pop(0)
                if expected is not module:
                    raise RuntimeError(f"below {self.site.label!r} the forward takes another path than before")
                output = tree_map(as_many, output)
                if waiting:
                    return output
                given = activation.clone() if self._overwrites else activation
                return replaced(output, path_to_tensor(output) or (), given)

            return run

        if not _has_masks(self.example):
            call = self.example.map(lambda _, x: as_many(x) if isinstance(x, Tensor) else x * len(activation))
        with every_module_called(self._root), ExitStack() as stack:
            for module in dict.fromkeys(module for module, _ in waiting):
                stack.enter_context(_called_instead(module, instead_of(module)))
            # Without the hooks of the model itself: who watches its forwards has no use for one of half a model.
            forward = self._root if self._root is self._module else self._root.forward
            return forward(*call.args, **call.kwargs)

    def _may_stand_still(self, example: CallArguments) -> bool:
        """Whether the output is that of the whole forward: for other activations, fewer inputs, and other masks."""

        def is_same(call: CallArguments) -> bool:
            activation = self.representation(*call.args, **call.kwargs)
            turned = call.map(lambda _, leaf: leaf.flip(0) if isinstance(leaf, Tensor) else leaf)
            for given in (activation, activation.flip(0)):
                expected = self._substituted(given, call)
                self._root(*turned.args, **turned.kwargs)  # so that no module remembers anything of this input
                with kept_attributes(self._root):
                    before = _marks(self._around)
                    output = self._run_above(given, call)
                    self._leaves_marks |= _marks(self._around) != before
                if not _same_outputs(output, expected):
                    return False
            return True

        calls = [example, example.inputs(0, example.count() - 1)]
        with suppress(Exception):  # a forward that does not bear it may fail in any way; then the whole of it is run
            if all(map(is_same, calls)) and (not _has_masks(example) or is_same(example.map(_other_mask))):
                return True
        whole = self._root(*example.args, **example.kwargs)
        again = self._substituted(self.representation(*example.args, **example.kwargs), example)
        if not _same_outputs(again, whole):
            raise SiteError(f"two forwards of one input differ above {self.site.label!r}: the model is random in eval")
        return False

    def _leaks(self, call: CallArguments) -> tuple[bool, list[str]]:
        """Whether the answer depends on more than the activation, and what goes around the site, the last first.

        That is what the answer is directly made from and what differs between two inputs: arguments of the model, and
        outputs of modules that ran before the site. Each of them is detached from what it was made from, so that a
        gradient of the answer reaches only what is used directly.
        """
        names = Names.of(self._root)
        first, other = call.inputs(0, 1), other_content(call)
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
            for one in (first, other):
                parts, below = [], True
                with torch.enable_grad():
                    runs.append((answer_in(self._run(at_site, one.map(argument))), parts))
        finally:
            for handle in handles:
                handle.remove()
        (answer, of_first), (answer_to_other, of_other) = runs
        used: list[Tensor | None] = [None] * len(of_first)
        if answer is not None and answer.requires_grad and of_first:
            leaves = [leaf for _, leaf in of_first]
            used = list(torch.autograd.grad(answer, leaves, torch.ones_like(answer), allow_unused=True))
        around = [
            label
            for (label, leaf), (_, leaf_of_other), grad in zip(of_first, of_other, used, strict=False)
            if grad is not None and not _equal(leaf.detach(), leaf_of_other.detach())
        ]
        return bool(around) or not _close(answer, answer_to_other), list(dict.fromkeys(reversed(around)))

    def _meeting_place(self, call: CallArguments) -> str:
        """The innermost module with the site in it that nothing goes around; "" where there is none."""
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
    own = vars(module)
    before = {key: own[key] for key in ("_compiled_call_impl",) if key in own}
    own["_compiled_call_impl"] = function
    try:
        yield
    finally:
        del own["_compiled_call_impl"]
        own.update(before)


def _marks(modules: Iterable[nn.Module]) -> list[Any]:
    """What shows that a forward changed something: which attributes there are, their sizes, versions of tensors."""
    parts = [part for module in modules for part in (*vars(module).values(), *module.buffers(recurse=False))]
    return [
        (id(part), part._version if isinstance(part, Tensor) else len(part) if isinstance(part, Sized) else None)
        for part in parts
    ]


def _few(call: CallArguments) -> CallArguments:
    """A few of the inputs, at least two: a single one is doubled."""
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


def is_mask(name: str, leaf: Any) -> bool:
    """Whether an argument says which tokens count, or where they are, and not what they are."""
    return isinstance(leaf, Tensor) and (leaf.dtype == torch.bool or name.endswith(("mask", "position_ids")))


def _has_masks(call: CallArguments) -> bool:
    return any(is_mask(name, leaf) for name, leaf in call.named_leaves())


def _other_mask(name: str, leaf: Any) -> Any:
    """Another padding of the first input, or its positions in another order."""
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


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = tensors_in(one), tensors_in(other)
    if not ours:
        return bool(one == other)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# One of the networks of a stitch: a model with its preparation of inputs, and its cut


def answer_of(output: Any) -> Tensor:
    answer = answer_in(output)
    if answer is None:
        raise TypeError(f"the network answered with no tensor but {type(output).__name__}")
    return answer


@dataclass
class CutModel(Network):
    """One of the two networks, cut at a site."""

    cut: Cut = field(init=False, repr=False)  # from `cut_at`

    def cut_at(self, site: str, batch: Any, *, check: bool = False) -> CutModel:
        """The same network, cut at a site; the cut is tried on a batch. `check`: raise where something goes around."""
        args, kwargs = self.call(batch)
        model = replace(self)
        model.cut = Cut(self.model, site, *args, **kwargs)
        if check:
            model.cut.check(*args, **kwargs)
        return model

    def call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the model is called with for a batch, on its device."""
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
        padding = [_no_padding(masks, each, site) for each, site in zip(activations, sites, strict=True)]
        return output, activations, padding

    def mixing_at(self, sites: Sequence[Site], batch: Any) -> str | None:
        """Whether the inputs of a batch are mixed up to these sites, in words; None: they are not."""
        with replace(self, sites=[site.label for site in sites]).opened() as network:
            return network.mixing(batch)


def _no_padding(masks: Masks, activation: Tensor, site: Site) -> Tensor | None:
    mask = masks.at(site, activation)
    return None if mask is None or activation.ndim != 3 else token_mask(mask, "positions", activation, site=site)
