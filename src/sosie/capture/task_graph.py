"""The task map as a graph: what of a model's forward comes after a site."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Node
from torch.fx.proxy import TraceError

from .arguments import CallArguments
from .outputs import ANSWERS, path_to_tensor, tensors_in
from .tracing import SiteTracer


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
