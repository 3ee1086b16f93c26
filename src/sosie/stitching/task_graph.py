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
        self._interpreter = fx.Interpreter(root, garbage_collect_values=False, graph=fx.Graph())
        self._calls, self._computing = 0, False
        self.version = activation._version
        self.decided = False  # whether the forward did anything by a shape or the like that the graph does not repeat
        self.met = False  # whether the forward reached the site
        self.inputs: list[Node] = []  # one per tensor of the call
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
    """What the forward gets to see: `is None`, `if` and `isinstance(_, tuple)` must work."""
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
        """Whether the forward would do what the graph does: with these arguments, from an activation of this shape."""
        if self.shape is not None and activation.shape[1:] != self.shape:
            return False
        return not (call.args or call.kwargs) or call.form() == self.form

    def __call__(self, activation: Tensor, call: CallArguments) -> Any:
        return self.module.forward(activation, *self._inputs(call))

    def changed(self, activation: Tensor, call: CallArguments, other: CallArguments) -> list[tuple[str, str]]:
        """What goes around the site and is not the same for two inputs, and the module that it goes into."""
        one, two = (fx.Interpreter(self.module, garbage_collect_values=False) for _ in range(2))
        one.run(activation, *self._inputs(call))
        two.run(activation, *self._inputs(other))
        return [(label, into) for node, label, into in self.around if not _same(one.env[node], two.env[node])]

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
    # The graph runs on the model's own parts: moved or changed, they are seen as they then are.
    module = fx.GraphModule(root, graph, class_name=f"TaskMapOf{type(root).__name__}")
    for node in graph.find_nodes(op="get_attr"):
        if node.target in vars(root):
            vars(module)[node.target] = vars(root)[node.target]
    for kind in ("_parameters", "_buffers", "_modules"):
        vars(module)[kind] = vars(root)[kind]
    return TaskGraph(module, needs, around, call.form(), tuple(activation.shape[1:]) if tracer.decided else None)


def _read_batch_size_from(start: Node, graph: fx.Graph) -> None:
    """Take the number of inputs from the activation where the forward took it from further below.

    Recognised by its value alone, which may be something else's too: the caller tries the graph on other batches.
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
        # An in-place operation counts although nobody may use what it returns.
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
    """What is made from these; `by_values`: not where only a shape, a type or a device was taken."""
    made = set(nodes)
    for node in graph.nodes:
        is_form = "value" in node.meta and not tensors_in(node.meta["value"])
        if made.intersection(node.all_input_nodes) and not (by_values and is_form):
            made.add(node)
    return made


def _same(one: Any, other: Any) -> bool:
    ours, theirs = tensors_in(one), tensors_in(other)
    if not ours:
        return bool(one == other)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
