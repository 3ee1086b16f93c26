"""Recording a forward with torch.fx, each step computed on an example beside it.

Only the modules around a site are traced through; whatever does not contain it stays one call of the module itself.
Shapes are known from the example, so a model may loop, unpack and branch on them. What depends on the values of a
tensor is never decided here: that raises.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import Node, map_aggregate
from torch.fx.proxy import Attribute, TraceError

from .arguments import CallArguments
from .names import Names, ancestors
from .outputs import path_to_tensor, replaced, tensors_in

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
