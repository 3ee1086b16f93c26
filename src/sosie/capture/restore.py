"""Borrow a model: eval mode, a device, hooks that all fire; everything is restored afterwards."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.lazy import LazyModuleMixin

from ..process_state import OperationMode, SharedContext, attention_in_parts, held, kept_random_state

COMPILED = "_orig_mod"  # the child under which torch.compile keeps the module it wraps


def _as_written() -> AbstractContextManager[Any]:
    """What torch.compile made runs as it was written."""
    if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
        return torch.compiler.set_stance("force_eager")
    from torch._dynamo import eval_frame

    set_eval_frame = eval_frame.set_eval_frame
    return mock.patch.object(eval_frame, "set_eval_frame", lambda _: set_eval_frame(None))  # noqa: PT008


_EAGER = SharedContext(_as_written)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return every module once; unlike `model.modules()`, those too that are equal to another."""
    return list({id(module): module for _, module in model.named_modules(remove_duplicate=False)}.values())


@contextmanager
def every_module_called(model: nn.Module) -> Iterator[None]:
    """Reserve the model for this thread and disable what bypasses hooks: compiled code and attention's fused path."""
    modules = modules_of(model)
    with ExitStack() as stack:
        stack.enter_context(held(modules))
        if any(map(is_compiled, modules)):
            stack.enter_context(_EAGER)
        if any(isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for module in modules):
            stack.enter_context(attention_in_parts)
        yield


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile stands between a call of this module and its code."""
    return (
        COMPILED in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


@contextmanager
def as_found(models: nn.Module | Iterable[nn.Module], device: str | torch.device | None = None) -> Iterator[None]:
    """Put models into eval mode without gradients, on `device` if one is given, and restore everything afterwards.

    Restored, after an exception too, are each submodule's training flag, each parameter's requires_grad and storage,
    the device, and the random states of torch (CPU, CUDA), NumPy's global generator and Python. The random states are
    left alone while another thread lives, since it would draw the same numbers again. Gradients are off through
    no_grad, not inference_mode, because what a forward caches in a buffer must be able to enter a later backward.
    Other threads that need one of the models wait.
    """
    unique = list({id(model): model for model in ([models] if isinstance(models, nn.Module) else models)}.values())
    target = None if device is None else torch.device(device)
    with ExitStack() as stack:
        parts = [_parts(model) for model in unique]
        stack.enter_context(_held(parts))
        stack.enter_context(kept_random_state(cuda=target is not None and target.type == "cuda"))
        for modules, parameters in parts:
            stack.enter_context(_flags(modules, parameters))
        if target is not None:
            for model in unique:
                stack.enter_context(_placement(model, target))
        for model, (modules, parameters) in zip(unique, parts, strict=True):
            _evaluate(model, modules, parameters)
        stack.enter_context(torch.no_grad())
        yield


def borrowed(models: Iterable[nn.Module], *, refusal: str | None = None) -> AbstractContextManager[None]:
    """Reserve models, with all that they share with others, for this thread: see `held`."""
    return _held([_parts(model) for model in models], refusal)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, with gradients as the caller has them, and restore every flag afterwards."""
    parts = _parts(model)
    with _held([parts]), _flags(*parts):
        _evaluate(model, *parts)
        yield


def _evaluate(model: nn.Module, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
    """Set eval mode unless it is set already: setting hundreds of flags takes almost a millisecond."""
    # accelerate brings the weights of a layer with `_hf_hook` from memory or disk when the layer is called.
    if any(p.is_meta for p in parameters) and not any(hasattr(module, "_hf_hook") for module in modules):
        name = next(name for name, parameter in model.named_parameters() if parameter.is_meta)
        raise ValueError(f"{name} is on the meta device, which holds no numbers: load the weights first")
    for module in modules:
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise ValueError(f"a {type(module).__name__} has no weights yet: run one batch through the model first")
    if any(getattr(module, "training", False) for module in modules):  # a frozen script has no mode
        try:
            model.eval()
        except NotImplementedError as error:  # torch.export's
            raise ValueError(
                f"this {type(model).__name__} cannot be put into evaluation mode: if torch.export made it, give the "
                "ExportedProgram itself or the model that was exported"
            ) from error


def _parts(model: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return the model's modules and its parameters, which take a while to collect."""
    return modules_of(model), list(model.parameters())


def _held(
    parts: Iterable[tuple[list[nn.Module], list[nn.Parameter]]], refusal: str | None = None
) -> AbstractContextManager[None]:
    return held([part for modules, parameters in parts for part in (*modules, *parameters)], refusal=refusal)


@contextmanager
def _flags(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restore each flag afterwards, and undo what a module's own `train()` does: LoRA merges weights there."""
    training = [(module, module.training) for module in modules if hasattr(module, "training")]
    requires_grad = [(parameter, parameter.requires_grad) for parameter in parameters]
    weights_before = [
        (module, [(parameter, parameter.detach().clone()) for parameter in module.parameters(recurse=False)])
        for module, flag in training
        if flag and type(module).train is not nn.Module.train
    ]
    try:
        yield
    finally:
        for module, weights in weights_before:
            if not module.training:
                module.train()
            for weight, before in weights:
                if not torch.equal(weight, before):
                    weight.data.copy_(before)
        for module, flag in training:
            if module.training != flag:
                module.training = flag  # not train(flag): it would go through the children
        for parameter, flag in requires_grad:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


@contextmanager
def _placement(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the model to a device; afterwards it has its own parameters and buffers again, not copies.

    What a forward wrote into a buffer is written into the model's own; a buffer that it replaced stays replaced.
    """
    if device.type == "meta":
        raise ValueError("the meta device holds no numbers: name a device that computes")
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    tables = [vars(module).get("_buffers", {}) for module in modules_of(model)]
    tables = [table for table in tables if isinstance(table, dict)]  # a script makes a new one at each access
    buffers = [(table, name, buffer) for table in tables for name, buffer in table.items() if buffer is not None]
    moved: dict[int, Tensor] = {}
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but this torch ({torch.__version__}) finds no CUDA device")
    if len(homes) > 1:
        devices = ", ".join(sorted(map(str, homes)))
        raise ValueError(f"the model is spread over {devices}: leave out device to run it there")
    try:
        with torch.inference_mode(False):  # else the moved tensors could enter no backward
            model.to(device)
        for table, name, buffer in buffers:
            table[name] = moved.setdefault(id(buffer), table[name])  # torch copies a shared buffer for each module
        yield
    finally:
        kept = [each for each in buffers if not moved or each[0].get(each[1]) is moved[id(each[2])]]
        for home in homes:
            model.to(home)  # all of it, since a forward may have cached buffers on the device
        for table, name, buffer in kept:
            now = table[name]
            if now is not buffer and _is_plain(buffer):
                if now.shape != buffer.shape or not torch.equal(_bytes_of([now]), _bytes_of([buffer])):
                    _set(buffer, now)
                table[name] = buffer
        for parameter, before in data:
            parameter.data = before


_EVERY_MODULE_HAS = frozenset(vars(nn.Module()))  # flags, hooks, parameters, buffers, children
_PLAIN = frozenset({int, float, bool, str, type(None)})  # the types of most attributes, which contain nothing
_COPIED = 256 * 2**20  # bytes of tensors to copy, the smallest first: quantisers keep more as buffers
_SMALL = 2**20  # bytes up to which tensors are compared together


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Undo afterwards what trial forwards leave on a model.

    Restored are the attributes of its modules; the lists, dicts, sets, dataclasses, namespaces and objects of the
    model's own package among them, recursively; and the numbers in parameters and buffers, in other tensors and
    NumPy arrays there, and in random generators of torch, NumPy and Python. Other objects, such as iterators and sparse
    tensors, are not restored; `mixing_note` reports where they make forwards differ.
    """
    holdings, writes = _Holdings(model), _Writes(model.parameters())
    # torch.jit compares constants of a graph by operations that fail under a dispatch mode.
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules_of(model))
    try:
        with nullcontext() if scripted else writes:
            yield
    finally:
        writes.put_back()
        holdings.put_back()


def state_of(modules: Iterable[nn.Module]) -> list[Any]:
    """A fingerprint of the modules' state, to see that a forward changed it.

    It is made of attributes, sizes, the versions of tensors, and random generators.
    """
    parts = [part for module in modules for part in (*vars(module).values(), *module.buffers(recurse=False))]
    return [(id(part), _state_of(part)) for part in parts]


def _state_of(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part._version
    if (generator := _generator_state(part)) is not None:
        return repr(generator[1].tolist() if isinstance(generator[1], Tensor) else generator[1])
    # Objects of TorchScript have a method for a length that they do not have.
    return len(part) if isinstance(part, Sized) and not isinstance(part, torch.ScriptObject) else None


def _generator_state(value: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """The setter and the state of a random generator; None for anything else."""
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return value.set_state, value.get_state()
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(setattr, bits, "state"), bits.state
    return (value.setstate, value.getstate()) if isinstance(value, random.Random) else None


@contextmanager
def restored_after_errors(model: nn.Module) -> Iterator[None]:
    """Like `kept_attributes`, but only if an exception, or Ctrl-C, ends a forward."""
    holdings = _Holdings(model)
    try:
        yield
    except BaseException:
        holdings.put_back()
        raise


class _Writes(OperationMode):
    """Copies parameters just before an operation writes to them; copies of all would take too much memory."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that what is always compiled (flex_attention) stays compiled

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._data = [(parameter, parameter.data) for parameter in parameters if _is_plain(parameter)]
        self._parameters: dict[int, list[nn.Parameter]] = {}  # by storage
        for parameter, _ in self._data:
            self._parameters.setdefault(_storage(parameter), []).append(parameter)
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            for k, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[k] if k < len(args) else kwargs.get(argument.name)
                    for tensor in written if isinstance(written, (list, tuple)) else [written]:
                        if isinstance(tensor, Tensor) and _is_plain(tensor):
                            same = self._parameters.pop(_storage(tensor), [])
                            self._before += [(parameter, parameter.detach().clone()) for parameter in same]
        return func(*args, **kwargs)

    def put_back(self) -> None:
        for parameter, own in self._data:
            if _storage(parameter) != _storage(own):
                parameter.data = own
        for parameter, numbers in self._before:
            _set(parameter, numbers)


class _Holdings:
    """The containers, tensors and generators of a model with their contents."""

    def __init__(self, model: nn.Module) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], frozenset[str]]] = []
        self._others: list[tuple[Any, list[Any]]] = []  # lists, deques and sets
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._generators: list[tuple[Callable[[Any], Any], Any]] = []  # each setter with its state
        self._tensors: list[Tensor] = []
        self._seen: set[int] = set()
        self._packages = {_package(type(module)) for module in modules_of(model)} - {"torch"}
        for module in modules_of(model):
            self._keep_dict(vars(module), but=_EVERY_MODULE_HAS)
            self._keep(vars(module).get("_buffers"))
            for parameter in vars(module).get("_parameters", {}).values():
                if parameter is None or parameter.requires_grad or not _is_plain(parameter):
                    continue
                if parameter.nbytes <= _SMALL:
                    self._keep(parameter)
        # Numbers as bytes: the small tensors of one device and type are copied and compared at once.
        groups: dict[Any, list[Tensor]] = {}
        left = _COPIED
        for tensor in sorted(self._tensors, key=lambda tensor: tensor.nbytes):
            left -= tensor.nbytes
            if left >= 0:
                group = (tensor.device, tensor.dtype) if tensor.nbytes <= _SMALL else id(tensor)
                groups.setdefault(group, []).append(tensor)
        self._copies = [
            (group, [tensor.shape for tensor in group], _bytes_of(group).clone()) for group in groups.values()
        ]

    def _keep_dict(self, table: dict[Any, Any], but: frozenset[str] = frozenset()) -> None:
        content = {key: value for key, value in table.items() if key not in but}
        self._dicts.append((table, content, but))
        for value in content.values():
            if type(value) not in _PLAIN:
                self._keep(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            if _is_plain(value):
                self._tensors.append(value)
        elif isinstance(value, dict):
            self._seen.add(id(value))
            self._keep_dict(value)
        elif isinstance(value, (list, tuple, set, deque)):
            self._seen.add(id(value))
            if not isinstance(value, tuple):
                self._others.append((value, list(value)))
            for item in value:
                if type(item) not in _PLAIN:
                    self._keep(item)
        elif isinstance(value, np.ndarray) and value.nbytes <= _COPIED and not value.dtype.hasobject:
            self._arrays.append((value, value.copy()))
        elif (generator := _generator_state(value)) is not None:
            self._generators.append(generator)
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
            owned = isinstance(value, SimpleNamespace) or is_dataclass(value) or _package(type(value)) in self._packages
            if owned and not callable(value):
                self._seen.add(id(value))
                self._keep_dict(vars(value))
        self._seen.add(id(value))

    def put_back(self) -> None:
        """Restore only what changed: other threads may be reading the model, and autograd counts writes."""
        for tensors, shapes, numbers in self._copies:
            same = [tensor.shape for tensor in tensors] == shapes
            if same and torch.equal(_bytes_of(tensors), numbers):  # one wait for the GPU
                continue
            sizes = [shape.numel() * tensor.element_size() for tensor, shape in zip(tensors, shapes, strict=True)]
            for tensor, shape, before in zip(tensors, shapes, numbers.split(sizes), strict=True):
                if tensor.shape != shape or not torch.equal(_bytes_of([tensor]), before):
                    _set(tensor, before.clone().view(tensor.dtype).view(shape))
        for array, before in self._arrays:
            if not np.array_equal(array, before, equal_nan=array.dtype.kind in "fc"):
                array[...] = before
        for set_state, state in self._generators:
            set_state(state)
        for table, content, but in self._dicts:
            for key in [key for key in table if key not in content and key not in but]:
                del table[key]
            if not but and list(table) != list(content):
                table.clear()  # the order may matter too
            for key, value in content.items():
                if key not in table or table[key] is not value:
                    table[key] = value
        for container, items in self._others:
            now = list(container)
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(items)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _set(tensor: Tensor, numbers: Tensor) -> None:
    """Copy numbers into a tensor; if their shape differs, as its storage."""
    if tensor.shape != numbers.shape:
        tensor.data = numbers
        return
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:  # an expanded axis, which torch writes only once
            tensor, numbers = tensor.narrow(axis, 0, 1), numbers.narrow(axis, 0, 1)
    with torch.inference_mode():  # which may write to both kinds of tensor
        tensor.copy_(numbers)


def _bytes_of(tensors: list[Tensor]) -> Tensor:
    """Return the bytes of all tensors, which have one type, in one row."""
    with torch.no_grad():
        rows = [tensor.reshape(-1) for tensor in tensors]
        row = (rows[0] if len(rows) == 1 else torch.cat(rows)).resolve_conj().resolve_neg().detach()
    # A single number may have any stride.
    return (row if row.stride(0) == 1 else row.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _is_plain(tensor: Tensor) -> bool:
    strange = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized
    return type(tensor) in (Tensor, nn.Parameter) and not strange


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
