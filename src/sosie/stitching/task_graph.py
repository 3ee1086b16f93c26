"""The task map as a graph: what of a model's forward comes after a site."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Node, map_aggregate
from torch.fx.proxy import Attribute, TraceError

from ..capture.arguments import CallArguments
from ..capture.sites import Names, ancestors
from ..capture.structure import ANSWERS, path_to_tensor, replaced, tensors_in

# Recording a forward with torch.fx, each step computed on an example beside it
#
# Only the modules around a site are traced through; whatever does not contain it stays one call of the module itself.
# Shapes are known from the example, so a model may loop, unpack and branch on them. What depends on the values of a
# tensor is never decided here: that raises.

# Methods and functions that read a tensor's form and not its values.
_FORM = {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "type", "is_tensor"}
_FORM |= {"is_floating_point", "is_complex", "is_contiguous", "is_nested", "is_inference", "len"}


class _Proxy(fx.Proxy):
    """Stands for a value of the forward, and knows what it was on the example."""

    def _decide(self) -> Any:
        """The value itself, which the graph then holds for good."""
        value = _not_a_tensor(_value(self))
        self.tracer.decided = True  # type: ignore[attr-defined]
        return value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.node.meta["value"], name)
        if callable(found) and not isinstance(found, Tensor):
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
        self._calls, self._computing = 0, False
        self.version = activation._version
        self.decided = False  # whether the forward did anything by a shape or the like that the graph does not repeat
        self.met = False  # whether the forward came by the site
        self.inputs: list[Node] = []  # one a tensor of the call
        self.names: list[str] = []

    @contextmanager
    def recording_len(self) -> Iterator[None]:
        """Have `len(x)` recorded too: Python wants a number from it at once, so the name itself is taken over."""

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
        self.activation = self._placeholder("activation", self._example)
        call = self._arguments.map(self._input)

        def forward(root: nn.Module):  # an annotation would end up in the graph
            output = root_fn(root, *call.args, **call.kwargs)
            if isinstance(output, Mapping) and type(output) is not dict:
                return self.create_proxy("call_function", type(output), (), dict(output))  # fx makes dicts plain
            return output

        return forward, [self.root]

    def _input(self, name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            raise TraceError(f"{name} is a {type(leaf).__name__}: its contents would become part of the graph")
        proxy = self._placeholder(f"input_{len(self.inputs)}", leaf.clone())
        self.inputs.append(proxy.node)
        self.names.append(name)
        return proxy

    def _placeholder(self, target: str, value: Tensor) -> fx.Proxy:
        proxy = self.create_proxy("placeholder", target, (), {})
        proxy.node.meta["value"] = value
        return proxy

    def proxy(self, node: Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self._through

    def get_fresh_qualname(self, prefix: str) -> str:
        # fx would hang the tensor on the model, where no later move to a device reaches it.
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
                path = path_to_tensor(output, is_tensor=_stands_for_a_tensor)
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
        value = self._compute(kind, target, args, kwargs)
        if given and not tensors_in(value) and not _reads_form(target):
            raise TraceError(f"{target} makes a {type(value).__name__} of a tensor's values")
        proxy.node.meta["value"] = value
        proxy.node.meta["changes"] = versions != [tensor._version for tensor in given]
        self.decided |= isinstance(value, bool)
        return _opened(proxy, value)

    def _compute(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        self._computing = True
        try:
            match kind:
                case "call_function":
                    return target(*args, **kwargs)
                case "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                case "call_module":
                    return self.root.get_submodule(target)(*args, **kwargs)
            return reduce(getattr, target.split("."), self.root)
        finally:
            self._computing = False

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.decided = True
        return bool(_not_a_tensor(_value(obj)))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.decided = True
        return iter([obj[i] for i in range(len(_value(obj)))])  # type: ignore[index]


def _value(part: Any) -> Any:
    return part.node.meta["value"] if isinstance(part, fx.Proxy) else part


def _stands_for_a_tensor(part: Any) -> bool:
    return isinstance(part, fx.Proxy) and isinstance(_value(part), Tensor)


def _not_a_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        raise TraceError("the forward depends on the values of a tensor")
    return value


def _reads_form(target: Any) -> bool:
    return target in (getattr, operator.getitem) or getattr(target, "__name__", target) in _FORM


def _opened(proxy: fx.Proxy, value: Any) -> Any:
    """What the forward gets to see: `is None`, `if` and `isinstance(_, tuple)` must work."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) in (tuple, list):
        return type(value)(proxy[i] for i in range(len(value)))  # type: ignore[index]
    if type(value) is dict:
        return {key: proxy[key] for key in value}  # type: ignore[index]
    return proxy


@dataclass(frozen=True)
class Around:
    """Something computed without the site that the answer is made from."""

    node: Node
    label: str  # what it is: a module's output, an argument of the model
    into: str  # the module in which it meets what comes from the site; "" is the model itself


@dataclass(frozen=True)
class TaskGraph:
    """`module(activation, *inputs)`, where `inputs` are those of the model's tensors that the graph still needs."""

    module: fx.GraphModule
    needs: tuple[int, ...]  # their places among the tensors of the call
    around: tuple[Around, ...]
    form: CallArguments  # of the example's arguments
    shape: tuple[int, ...] | None  # of one input's activation, where the forward decided something by a shape

    def fits(self, activation: Tensor, call: CallArguments) -> bool:
        """Whether the forward would do what the graph does: with these arguments, from an activation of this shape."""
        if self.shape is not None and activation.shape[1:] != self.shape:
            return False
        return not (call.args or call.kwargs) or call.form() == self.form

    def __call__(self, activation: Tensor, call: CallArguments) -> Any:
        return self.module.forward(activation, *self._inputs(call))

    def changed(self, activation: Tensor, call: CallArguments, other: CallArguments) -> list[Around]:
        """What goes around the site and is not the same for two inputs."""
        seen = []
        for each in (call, other):
            run = fx.Interpreter(self.module, garbage_collect_values=False)
            run.run(activation, *self._inputs(each))
            seen.append(run.env)
        return [around for around in self.around if not _same(seen[0][around.node], seen[1][around.node])]

    def _inputs(self, call: CallArguments) -> list[Tensor]:
        if not self.needs:
            return []
        leaves = call.leaves()
        if not leaves:
            raise TypeError("this task map needs the model's input besides the activation: task(activation, x)")
        return [leaves[i] for i in self.needs]


def task_graph(root: nn.Module, site: tuple[str, int], activation: Tensor, call: CallArguments) -> TaskGraph:
    """The graph above one call of a module, from an example of the model's arguments and their activation there.

    Raises whatever a forward that cannot be traced raises: the caller has to have another way.
    """
    tracer = SiteTracer(root, site, activation, call)
    with tracer.recording_len():
        tracer.trace(root)
    if not tracer.met:
        raise TraceError("the forward was traced, but the site did not fire in it")
    graph, start = tracer.graph, tracer.activation.node
    _read_batch_size_from(start, graph)
    answer = _answer_node(graph)
    _drop_unused(graph, start)
    if activation._version != tracer.version:
        with graph.inserting_after(_last_placeholder(graph)):
            copied = graph.call_method("clone", (start,))
        start.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
    around = _around(graph, start, answer, tracer)
    needs = tuple(tracer.inputs.index(node) for node in graph.find_nodes(op="placeholder") if node is not start)
    for node in graph.nodes:
        node.meta.pop("value", None)
    shape = tuple(activation.shape[1:]) if tracer.decided else None
    return TaskGraph(_sharing(root, graph), needs, around, call.form(), shape)


def _read_batch_size_from(start: Node, graph: fx.Graph) -> None:
    """Take the number of inputs from the activation where the forward took it from further below.

    Told by its value alone, which may be something else's too: the caller tries the graph on other batches.
    """
    inputs = [node for node in graph.find_nodes(op="placeholder") if node is not start]
    above, below = _descendants([start], graph), _descendants(inputs, graph)
    sizes = [node for node in below - above if type(node.meta.get("value")) is int]
    sizes = [node for node in sizes if node.meta["value"] == len(start.meta["value"])]
    if sizes:
        with graph.inserting_after(_last_placeholder(graph)):
            shape = graph.call_function(getattr, (start, "shape"))
            shape.meta["value"] = start.meta["value"].shape
        with graph.inserting_after(shape):
            size = graph.call_function(operator.getitem, (shape, 0))
            size.meta["value"] = shape.meta["value"][0]
        for node in sizes:
            node.replace_all_uses_with(size)


def _drop_unused(graph: fx.Graph, start: Node) -> None:
    kept = _ancestors([graph.output_node()])
    while True:
        # An in-place operation counts although nobody may use what it returns.
        more = [node for node in graph.nodes if node.meta.get("changes") and kept.intersection(node.all_input_nodes)]
        if kept.issuperset(more):
            break
        kept |= _ancestors(more)
    for node in reversed(list(graph.nodes)):
        if node not in kept and node is not start:
            graph.erase_node(node)


def _answer_node(graph: fx.Graph) -> Node:
    output = graph.output_node()
    answer = output.args[0]
    if isinstance(answer, Node) and not isinstance(answer.meta.get("value"), Tensor):
        answer = answer.kwargs  # a ModelOutput, made from its entries
    path = path_to_tensor(answer, ANSWERS, lambda part: isinstance(part, Node))
    found: Any = answer if path is not None else output
    for key in path or ():
        found = found[key]
    return found


def _around(graph: fx.Graph, start: Node, answer: Node, tracer: SiteTracer) -> tuple[Around, ...]:
    inputs = [node for node in graph.find_nodes(op="placeholder") if node is not start]
    above, below = (_descendants(ends, graph, by_values=True) for ends in ([start], inputs))
    towards_answer = _ancestors([answer])
    found = []
    for node in graph.nodes:
        if node in above or node not in below or node not in towards_answer:
            continue
        meeting = [user for user in node.users if user in above and user in towards_answer]
        if meeting or node is answer:
            into = _module_of(meeting[0]) if meeting else ""
            found.append(Around(node, _label(node, tracer), into))
    return tuple(found)


def _label(node: Node, tracer: SiteTracer) -> str:
    if node.op == "call_module":
        return f"the output of {node.target}"
    if node.op == "placeholder":
        name = tracer.names[tracer.inputs.index(node)]
        return f"the model's argument {name}" if name else "the model's input"
    named = (below for below in _closest(node) if below.op == "call_module" or below in tracer.inputs)
    before = next(named, None)
    return f"{node.name!r} of {_label(before, tracer)}" if before is not None else repr(node.name)


def _closest(node: Node) -> Iterator[Node]:
    """What a node is made from, the nearest first."""
    waiting = [node]
    for each in waiting:
        yield each
        waiting += [below for below in each.all_input_nodes if below not in waiting]


def _module_of(node: Node) -> str:
    """The innermost traced module in whose forward a node was made."""
    stack = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
    return next((name for name in reversed(stack) if not (node.op == "call_module" and name == node.target)), "")


def _sharing(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs the graph on the model's own parts: moved or changed, they are seen as they then are."""
    module = fx.GraphModule(root, graph, class_name=f"TaskMapOf{type(root).__name__}")
    for node in graph.find_nodes(op="get_attr"):
        if node.target in vars(root):
            vars(module)[node.target] = vars(root)[node.target]
    for kind in ("_parameters", "_buffers", "_modules"):
        vars(module)[kind] = vars(root)[kind]
    return module


def _last_placeholder(graph: fx.Graph) -> Node:
    return list(graph.find_nodes(op="placeholder"))[-1]


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _descendants(nodes: Iterable[Node], graph: fx.Graph, *, by_values: bool = False) -> set[Node]:
    """What is made from these; `by_values`: not where only a shape, a type or a device was taken."""
    found = set(nodes)
    for node in graph.nodes:
        is_form = "value" in node.meta and not tensors_in(node.meta["value"])
        if found.intersection(node.all_input_nodes) and not (by_values and is_form):
            found.add(node)
    return found


def _same(one: Any, other: Any) -> bool:
    ours, theirs = tensors_in(one), tensors_in(other)
    if not ours:
        return bool(one == other)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
