"""Cutting a model in two at a site: what leads to the activation there, and what follows from it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Node, map_aggregate
from torch.fx.proxy import Attribute, TraceError

from ..capture import (
    BadBatch,
    Chunk,
    Masks,
    SilentSite,
    Site,
    SiteError,
    UnknownSite,
    Watch,
    answer_in,
    as_found,
    count_inputs,
    kept_attributes,
    nearest,
    unwrap,
    watch,
)
from ..capture.arguments import CallArguments
from ..capture.restore import evaluating
from ..capture.rows import token_mask
from ..capture.sites import Names, ancestors, find_name
from ..capture.structure import ANSWERS, activation_in, fresh_leaf, path_to_tensor, replaced, tensors_in
from ..capture.watch import every_module_called
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

    Above the site the model runs as a graph of its own modules, without anything below. Where its forward cannot be
    traced (because it branches on values, say), the whole forward runs with the activation put in its place: below the
    site on a single input if that gives the same output, else on all of them. When the cut is made, its output is
    compared with that of the whole model. The model is shared, not copied, and left as found; both maps run it in eval
    mode.
    """

    site: Site
    example: CallArguments  # of one input

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
            raise TypeError("a cut needs an example of the model's input: Cut(model, site, x)")
        with torch.inference_mode(False), as_found(self._root), kept_attributes(self._root), full_precision():
            example = _few(CallArguments(args, kwargs, self._parameters))
            with watch(self._root, f"{self._name}@{self._call_number}") as seen:
                seen.run(*example.args, **example.kwargs)
            (self.site,) = seen.sites
            (activation,) = seen.values()
            self._overwrites = False  # whether layers above the site change its activation in place
            given = activation.clone()
            self._substituted(given, example)
            self._overwrites = given._version > 0
            self._graph = self._traced(activation, example)
            self.example = example.inputs(0, 1)
            self._one_row = self._graph is None and self._one_row_is_enough(example)

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
        with self._evaluating():
            if self._graph is not None and self._graph.fits(activation, call):
                return self._graph(activation, call)
            if self._one_row and not _has_masks(call):
                call = call.inputs(0, 1) if args or kwargs else self.example
            elif not args and not kwargs:
                raise TypeError(
                    f"the task map from {self.site.label!r} runs the model's whole forward: give its input too, "
                    "task(activation, x)"
                )
            return self._substituted(activation, call)

    @property
    def needs_input(self) -> bool:
        """Whether `task` needs the model's input too; where it does not, nothing below the site is run on it."""
        return bool(self._graph.needs) if self._graph is not None else not self._one_row

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise LeakingCut if the answer still depends on the input when the activation is held fixed.

        Two different inputs of this batch are tried, both with the padding mask and the positions of the first, which
        belong to both maps.
        """
        with torch.inference_mode(False), as_found(self._root), kept_attributes(self._root), full_precision():
            call = CallArguments(args, kwargs, self._parameters).map(_copied)
            first, other = call.inputs(0, 1), other_content(call)
            activation = self.representation(*first.args, **first.kwargs)
            if self._graph is not None and self._graph.fits(activation, first):
                around = self._graph.changed(activation, first, other)
                leaks = bool(around)
            else:
                leaks = not _close(*(answer_in(self._substituted(activation, each)) for each in (first, other)))
                around = self._changed_outputs(activation, (first, other)) if leaks else []
        if not leaks:
            return
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
        """The model's forward with a function applied to the site's output; where it returns None, nothing changes."""
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
        """The output of the whole forward with this activation put in its place."""
        given = activation.clone() if self._overwrites else activation

        def put(output: Any) -> Any:
            path = path_to_tensor(output)
            if path is None:
                raise SiteError(f"the site {activation_in(output)}: no other activation can be put in its place")
            return replaced(output, path, given)

        return self._run(put, call)

    def _traced(self, activation: Tensor, example: CallArguments) -> TaskGraph | None:
        """The graph of what comes after the site; None unless its output is that of the whole forward."""
        try:
            with kept_attributes(self._root):
                graph = task_graph(self._root, (self._name, self._call_number), activation.clone(), example)
            for call in (example, example.inputs(0, example.count() - 1)):
                activation = self.representation(*call.args, **call.kwargs)
                for given in (activation, activation.flip(0)):
                    expected = self._substituted(given, call)
                    turned = call.map(lambda _, leaf: leaf.flip(0) if isinstance(leaf, Tensor) else leaf)
                    self._root(*turned.args, **turned.kwargs)  # so that no module remembers anything of this input
                    if not _same_outputs(graph(given, call), expected):
                        return None
        except Exception:  # a forward that cannot be traced may fail in any way; then the whole forward is run
            return None
        return graph

    def _one_row_is_enough(self, example: CallArguments) -> bool:
        whole = self._root(*example.args, **example.kwargs)
        activation = self.representation(*example.args, **example.kwargs)
        if not _same_outputs(self._substituted(activation, example), whole):
            raise SiteError(f"two forwards of one input differ above {self.site.label!r}: the model is random in eval")
        if _has_masks(example):
            return False  # each input has its own mask
        rows = [example.inputs(i, i + 1) for i in (0, example.count() - 1)]
        try:
            with kept_attributes(self._root):
                return all(_same_outputs(self._substituted(activation, row), whole) for row in rows)
        except Exception:  # a forward that remembers how many inputs it began with
            return False

    def _changed_outputs(self, activation: Tensor, calls: Sequence[CallArguments]) -> list[tuple[str, str]]:
        """The layers below the site, last first, that the answer is directly made from and that differ between calls.

        Below the site each layer's output is detached from its own inputs, so that a gradient of the answer reaches
        only what is used directly. As from `TaskGraph.changed`, but the module where they meet is not known.
        """
        names = Names.of(self._root)
        below = True
        outputs: dict[str, Tensor] = {}

        def at_site(output: Any) -> Any:
            nonlocal below
            below = False
            path = path_to_tensor(output)
            return output if path is None else replaced(output, path, activation.detach().clone())

        def detach(name: str) -> Callable[[nn.Module, Any, Any], Any]:
            def fire(module: nn.Module, args: Any, output: Any) -> Any:
                leaf = fresh_leaf(output, anew=True) if below and isinstance(activation_in(output), Tensor) else None
                if leaf is None:
                    return None
                outputs[name] = leaf[0]
                return leaf[1]

            return fire

        seen: list[dict[str, Tensor]] = []
        used: list[str] = []  # by the answer to the first call
        handles = [names.by_name[name].register_forward_hook(detach(name)) for name in names.leaves()]
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
        return [(f"the output of {name}", "") for name in reversed(differ)]

    def _evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self._root) if self._root.training else nullcontext()


def _few(call: CallArguments) -> CallArguments:
    """A few of the inputs, at least two: a single one is doubled."""
    count = call.count()
    if count == 0:
        raise BadBatch("the example has no inputs: give at least one")
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

    def cut_at(self, site: str, batch: Any) -> CutModel:
        """Cut it at a site; the cut is tried on a batch."""
        args, kwargs = self.call(batch)
        self.cut = Cut(self.model, site, *args, **kwargs)
        return self

    def call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the model is called with for a batch, on its device."""
        return self.arguments(Chunk(batch, 0, count_inputs(batch)))

    def answer(self, batch: Any) -> Tensor:
        args, kwargs = self.call(batch)
        return answer_of(self.model(*args, **kwargs))

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


# The task map as a graph: the forward is recorded with torch.fx, and each step computed on an example at the same time
#
# Only the modules around a site are traced through; a module that does not contain it remains one call.
# Shapes are known from the example, so a model may loop, unpack and branch on them. A forward that branches on the
# values of a tensor raises.

# Methods and functions that read a tensor's form and not its values.
_FORM = {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "type", "is_tensor"}
_FORM |= {"is_floating_point", "is_complex", "is_contiguous", "is_nested", "is_inference", "len"}


class _Proxy(fx.Proxy):
    """Stands for a value of the forward, and knows its value on the example."""

    def _decide(self) -> Any:
        """The value itself, which becomes a constant of the graph."""
        value = _not_a_tensor(_value(self))
        self.tracer.decided = True  # type: ignore[attr-defined]
        return value

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.node.meta["value"], name)
        if callable(attribute) and not isinstance(attribute, Tensor):
            return Attribute(self, name)  # a method, recorded when it is called
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __len__(self) -> int:
        self.tracer.decided = True  # type: ignore[attr-defined]
        return len(_value(self))

    def __index__(self) -> int:
        return operator.index(self._decide())

    def __int__(self) -> int:
        return int(self._decide())

    def __float__(self) -> float:
        return float(self._decide())


class SiteTracer(fx.Tracer):
    """Records a model's forward with the output of one call of one module replaced by a placeholder."""

    proxy_buffer_attributes = True

    def __init__(self, root: nn.Module, site: tuple[str, int], activation: Tensor, call: CallArguments) -> None:
        super().__init__()
        names = Names.of(root)
        self._site, self._call = names.by_name[site[0]], site[1]
        own = [name for name, module in names.by_name.items() if module is self._site]
        above = [names.by_name[above] for name in own for above in ancestors(name)]
        self._through = {id(module): module for module in above}
        self._example, self._arguments = activation, call
        self._interpreter = fx.Interpreter(root, garbage_collect_values=False, graph=fx.Graph())
        self._calls, self._computing = 0, False
        self.version = activation._version
        self.decided = False  # whether the forward branched on a shape or the like, which the graph does not repeat
        self.met = False  # whether the forward reached the site
        self.inputs: list[Node] = []  # one per tensor of the call
        self.names: list[str] = []

    @contextmanager
    def recording_len(self) -> Iterator[None]:
        """Record `len(x)` too: Python requires it to be a number, so the name `len` itself is replaced."""

        def length(part: Any) -> Any:
            return self.create_proxy("call_function", len, (part,), {}) if isinstance(part, fx.Proxy) else len(part)

        forwards = [inspect.unwrap(type(module).forward) for module in self._through.values()]
        scopes = {id(scope): scope for forward in forwards if (scope := getattr(forward, "__globals__", None))}
        taken = [scope for scope in scopes.values() if "len" not in scope]
        try:
            for scope in taken:
                scope["len"] = length
            yield
        finally:
            for scope in taken:
                del scope["len"]

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        def placeholder(target: str, value: Tensor) -> fx.Proxy:
            proxy = self.create_proxy("placeholder", target, (), {})
            proxy.node.meta["value"] = value
            return proxy

        def input_of(name: str, leaf: Any) -> fx.Proxy:
            if not isinstance(leaf, Tensor):
                raise TraceError(f"{name} is a {type(leaf).__name__}: its contents would become part of the graph")
            proxy = placeholder(f"input_{len(self.inputs)}", leaf.clone())
            self.inputs.append(proxy.node)
            self.names.append(name)
            return proxy

        self.activation = placeholder("activation", self._example)
        call = self._arguments.map(input_of)

        def forward(root: nn.Module):  # an annotation would end up in the graph
            output = root_fn(root, *call.args, **call.kwargs)
            if isinstance(output, Mapping) and type(output) is not dict:
                return self.create_proxy("call_function", type(output), (), dict(output))  # fx makes dicts plain
            return output

        return forward, [self.root]

    def proxy(self, node: Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self._through

    def get_fresh_qualname(self, prefix: str) -> str:
        # fx would attach the tensor to the model, and it would stay on its device when the model is moved.
        raise TraceError("the forward makes a tensor of its own")

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._computing:
            return forward(*args, **kwargs)
        output = super().call_module(m, forward, args, kwargs)
        if m is self._site:
            self._calls += 1
            if self._calls == self._call:
                path = path_to_tensor(
                    output, is_tensor=lambda part: isinstance(part, fx.Proxy) and isinstance(_value(part), Tensor)
                )
                if path is None:
                    raise TraceError(f"cannot take the site's {type(output).__name__} apart")
                self.met, output = True, replaced(output, path, self.activation)
        return output

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **options: Any) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, *others, **options)
        if kind == "placeholder":
            return proxy
        args, kwargs = map_aggregate((args, kwargs), _value)
        given = [*tensors_in(args), *tensors_in(kwargs)]
        versions = [tensor._version for tensor in given]
        self._computing = True
        try:
            value = getattr(self._interpreter, kind)(target, args, kwargs)
        finally:
            self._computing = False
        reads_form = target in (getattr, operator.getitem) or getattr(target, "__name__", target) in _FORM
        if given and not tensors_in(value) and not reads_form:
            raise TraceError(f"{target} makes a {type(value).__name__} of a tensor's values")
        proxy.node.meta["value"] = value
        proxy.node.meta["changes"] = versions != [tensor._version for tensor in given]
        self.decided |= isinstance(value, bool)
        return _opened(proxy, value)

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.decided = True
        return bool(_not_a_tensor(_value(obj)))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.decided = True
        return iter([obj[i] for i in range(len(_value(obj)))])  # type: ignore[index]


def _value(part: Any) -> Any:
    return part.node.meta["value"] if isinstance(part, fx.Proxy) else part


def _not_a_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        raise TraceError("the forward depends on the values of a tensor")
    return value


def _opened(proxy: fx.Proxy, value: Any) -> Any:
    """What the forward is handed: `is None`, `if` and `isinstance(_, tuple)` must work."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) in (tuple, list):
        return type(value)(proxy[i] for i in range(len(value)))  # type: ignore[index]
    if type(value) is dict:
        return {key: proxy[key] for key in value}  # type: ignore[index]
    return proxy


# Something computed without the site that the answer is made from: its node, what it is (a module's output, an argument
# of the model), and the module in which it meets what comes from the site ("" is the model itself).
Around = tuple[Node, str, str]


@dataclass(frozen=True)
class TaskGraph:
    """`module(activation, *inputs)`, where `inputs` are those of the model's tensors that the graph still needs."""

    module: fx.GraphModule
    needs: tuple[int, ...]  # their places among the tensors of the call
    around: tuple[Around, ...]
    form: CallArguments  # of the example's arguments
    shape: tuple[int, ...] | None  # of one input's activation, where the forward decided something by a shape

    def fits(self, activation: Tensor, call: CallArguments) -> bool:
        """Whether the graph stands for the forward with these arguments, from an activation of this shape."""
        if self.shape is not None and activation.shape[1:] != self.shape:
            return False
        return not (call.args or call.kwargs) or call.form() == self.form

    def __call__(self, activation: Tensor, call: CallArguments) -> Any:
        return self.module.forward(activation, *self._inputs(call))

    def changed(self, activation: Tensor, call: CallArguments, other: CallArguments) -> list[tuple[str, str]]:
        """What goes around the site and differs between two inputs, and the module that it goes into."""
        one, two = (fx.Interpreter(self.module, garbage_collect_values=False) for _ in range(2))
        one.run(activation, *self._inputs(call))
        two.run(activation, *self._inputs(other))
        return [(label, into) for node, label, into in self.around if not _equal(one.env[node], two.env[node])]

    def _inputs(self, call: CallArguments) -> list[Tensor]:
        if not self.needs:
            return []
        leaves = call.leaves()
        if not leaves:
            raise TypeError("this task map needs the model's input besides the activation: task(activation, x)")
        return [leaves[i] for i in self.needs]


def task_graph(root: nn.Module, site: tuple[str, int], activation: Tensor, call: CallArguments) -> TaskGraph:
    """The graph above one call of a module, from an example of the model's arguments and their activation there.

    A forward that cannot be traced may raise anything.
    """
    tracer = SiteTracer(root, site, activation, call)
    with tracer.recording_len():
        tracer.trace(root)
    if not tracer.met:
        raise TraceError("the forward was traced, but the site did not fire in it")
    graph, start = tracer.graph, tracer.activation.node
    _read_batch_size_from(start, graph)
    # The node of the answer, by the path that leads to it; the whole output where there is none.
    answer: Any = graph.output_node().args[0]
    if isinstance(answer, Node) and not isinstance(answer.meta.get("value"), Tensor):
        answer = answer.kwargs  # a ModelOutput, made from its entries
    path = path_to_tensor(answer, ANSWERS, lambda part: isinstance(part, Node))
    answer = graph.output_node() if path is None else reduce(operator.getitem, path, answer)
    _drop_unused(graph, start)
    if activation._version != tracer.version:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            copied = graph.call_method("clone", (start,))
        start.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
    around = _around(graph, start, answer, tracer)
    needs = tuple(tracer.inputs.index(node) for node in graph.find_nodes(op="placeholder") if node is not start)
    for node in graph.nodes:
        node.meta.pop("value", None)
    # The graph shares the model's own parts, so it follows when they are moved or changed.
    module = fx.GraphModule(root, graph, class_name=f"TaskMapOf{type(root).__name__}")
    for node in graph.find_nodes(op="get_attr"):
        if node.target in vars(root):
            vars(module)[node.target] = vars(root)[node.target]
    for kind in ("_parameters", "_buffers", "_modules"):
        vars(module)[kind] = vars(root)[kind]
    return TaskGraph(module, needs, around, call.form(), tuple(activation.shape[1:]) if tracer.decided else None)


def _read_batch_size_from(start: Node, graph: fx.Graph) -> None:
    """Read the number of inputs from the activation where the forward read it from something below the site.

    It is recognised by its value alone, which something else may share: the caller tries the graph on other batches.
    """
    inputs = [node for node in graph.find_nodes(op="placeholder") if node is not start]
    count = len(start.meta["value"])
    below = _descendants(inputs, graph) - _descendants([start], graph)
    sizes = [node for node in below if type(node.meta.get("value")) is int and node.meta["value"] == count]
    if sizes:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            shape = graph.call_function(getattr, (start, "shape"))
            shape.meta["value"] = start.meta["value"].shape
        with graph.inserting_after(shape):
            size = graph.call_function(operator.getitem, (shape, 0))
            size.meta["value"] = count
        for node in sizes:
            node.replace_all_uses_with(size)


def _drop_unused(graph: fx.Graph, start: Node) -> None:
    kept = _ancestors([graph.output_node()])
    while True:
        # An in-place operation counts even if its return value is not used.
        more = [node for node in graph.nodes if node.meta.get("changes") and kept.intersection(node.all_input_nodes)]
        if kept.issuperset(more):
            break
        kept |= _ancestors(more)
    for node in reversed(list(graph.nodes)):
        if node not in kept and node is not start:
            graph.erase_node(node)


def _around(graph: fx.Graph, start: Node, answer: Node, tracer: SiteTracer) -> tuple[Around, ...]:
    inputs = [node for node in graph.find_nodes(op="placeholder") if node is not start]
    above, below = (_descendants(ends, graph, by_values=True) for ends in ([start], inputs))
    towards_answer = _ancestors([answer])
    around = []
    for node in graph.nodes:
        if node in above or node not in below or node not in towards_answer:
            continue
        meeting = [user for user in node.users if user in above and user in towards_answer]
        if meeting or node is answer:
            # The innermost traced module in whose forward the two meet.
            stack = [name for name, _ in meeting[0].meta.get("nn_module_stack", {}).values()] if meeting else []
            if meeting and meeting[0].op == "call_module":
                stack = [name for name in stack if name != meeting[0].target]
            around.append((node, _label(node, tracer), stack[-1] if stack else ""))
    return tuple(around)


def _label(node: Node, tracer: SiteTracer) -> str:
    """A module's output, an argument of the model, or something made from the nearest of these."""
    if node.op == "call_module":
        return f"the output of {node.target}"
    if node.op == "placeholder":
        name = tracer.names[tracer.inputs.index(node)]
        return f"the model's argument {name}" if name else "the model's input"
    waiting = [node]
    for each in waiting:
        if each.op == "call_module" or each in tracer.inputs:
            return f"{node.name!r} of {_label(each, tracer)}"
        waiting += [below for below in each.all_input_nodes if below not in waiting]
    return repr(node.name)


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    seen, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _descendants(nodes: Iterable[Node], graph: fx.Graph, *, by_values: bool = False) -> set[Node]:
    """The nodes made from these; `by_values`: except where only a shape, a type or a device was read."""
    made = set(nodes)
    for node in graph.nodes:
        is_form = "value" in node.meta and not tensors_in(node.meta["value"])
        if made.intersection(node.all_input_nodes) and not (by_values and is_form):
            made.add(node)
    return made


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = tensors_in(one), tensors_in(other)
    if not ours:
        return bool(one == other)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
