"""Borrowing a model: its modules, eval mode, a device, hooks that all fire; afterwards everything as it was found."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..process_state import Shared, attention_in_parts, held, kept_random_state

COMPILED = "_orig_mod"  # the child under which torch.compile keeps the module it wraps
_EAGER = Shared(lambda: torch.compiler.set_stance("force_eager"))


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Every module once, as `model.modules()` has them, but not in that order, and in a quarter of the time."""
    modules, known = [model], {id(model)}
    for module in modules:
        if children := module._modules:  # most have none
            for child in children.values():
                if child is not None and id(child) not in known:
                    known.add(id(child))
                    modules.append(child)
    return modules if _as_torch_has(modules, "modules", "named_modules") else list(model.modules())


def parameters_of(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """As `model.parameters()` has them, of a model whose modules are known; a shared one more than once."""
    if not _as_torch_has(modules, "parameters", "named_parameters"):
        return list(model.parameters())
    return [own for module in modules for own in module._parameters.values() if own is not None]


def _as_torch_has(modules: Iterable[nn.Module], *methods: str) -> bool:
    """Whether no class among these has methods of its own in place of torch's: it may show what lies elsewhere."""
    kinds = set(map(type, modules))
    return all(getattr(kind, method) is getattr(nn.Module, method) for kind in kinds for method in methods)


@contextmanager
def every_module_called(model: nn.Module) -> Iterator[None]:
    """The model in this thread alone, without what passes hooks by: compiled code, and attention's fused path."""
    modules = modules_of(model)
    with ExitStack() as stack:
        stack.enter_context(held(modules))
        if any(map(_is_compiled, modules)):
            stack.enter_context(_EAGER)
        if any(isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for module in modules):
            stack.enter_context(attention_in_parts)
        yield


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile stands between a call of this module and its code."""
    return (
        COMPILED in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


@contextmanager
def as_found(models: nn.Module | Iterable[nn.Module], device: str | torch.device | None = None) -> Iterator[None]:
    """Models in eval mode without gradients, on `device` if one is given; afterwards everything as before.

    Put back, after an exception too: each submodule's training flag, each parameter's requires_grad and
    storage, the device, and the random states of torch (CPU, CUDA), NumPy's global generator and Python.
    The random states stay where they are if another thread lives, which would draw the same numbers again.
    Gradients are off through no_grad and not inference_mode: what a forward caches in a buffer must be able
    to enter a later backward. Another thread that wants one of the models meanwhile waits.
    """
    found = [models] if isinstance(models, nn.Module) else list(models)
    unique = list({id(model): model for model in found}.values())
    target = None if device is None else torch.device(device)
    with ExitStack() as stack:
        parts = [_parts(model) for model in unique]
        stack.enter_context(_held(parts))
        stack.enter_context(kept_random_state(cuda=target is not None and target.type == "cuda"))
        for each in parts:
            stack.enter_context(_flags(*each))
        if target is not None:
            for model in unique:
                stack.enter_context(_placement(model, target))
        for model, each in zip(unique, parts, strict=True):
            _evaluate(model, *each)
        stack.enter_context(torch.no_grad())
        yield


def borrowed(models: Iterable[nn.Module], *, refusal: str | None = None) -> AbstractContextManager[None]:
    """Models with all that they share with others, in this thread alone: see `held`."""
    return _held([_parts(model) for model in models], refusal)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, gradients as the caller has them; afterwards every flag as before."""
    parts = _parts(model)
    with _held([parts]), _flags(*parts):
        _evaluate(model, *parts)
        yield


def _evaluate(model: nn.Module, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
    """Eval mode; a model that is in it is left alone: setting hundreds of flags takes a good part of a millisecond."""
    if any(parameter.is_meta for parameter in parameters):
        name = next(name for name, parameter in model.named_parameters() if parameter.is_meta)
        raise ValueError(f"{name} is on the meta device, which holds no numbers: load the weights first")
    for module in modules:
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise ValueError(
                f"a {type(module).__name__} of the model has no weights yet: run one batch through the model first"
            )
    if any(module.training for module in modules):
        model.eval()


def _parts(model: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Its modules, which take a while to go through, and its parameters."""
    modules = modules_of(model)
    return modules, parameters_of(model, modules)


def _held(
    parts: Iterable[tuple[list[nn.Module], list[nn.Parameter]]], refusal: str | None = None
) -> AbstractContextManager[None]:
    return held([each for modules, parameters in parts for each in (*modules, *parameters)], refusal=refusal)


@contextmanager
def _flags(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Afterwards each flag as before, and what a module's own `train()` did is undone: LoRA merges weights there."""
    training = [(module, module.training) for module in modules]
    requires_grad = [(parameter, parameter.requires_grad) for parameter in parameters]
    own = [
        (module, [(each, each.detach().clone()) for each in module.parameters(recurse=False)])
        for module, flag in training
        if flag and type(module).train is not nn.Module.train
    ]
    try:
        yield
    finally:
        for module, weights in own:
            if not module.training:
                module.train()
            for weight, was in weights:
                if not torch.equal(weight, was):
                    weight.data.copy_(was)
        for module, flag in training:
            if module.training != flag:
                module.training = flag  # not train(flag): it would go through the children
        for parameter, flag in requires_grad:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


@contextmanager
def _placement(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on a device; afterwards its parameters and buffers are its own again, not copies.

    What a forward wrote into a buffer is written into the model's own; a buffer that it replaced stays replaced.
    """
    if device.type == "meta":
        raise ValueError("the meta device holds no numbers: name a device that computes")
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    places = [vars(module).get("_buffers", {}) for module in modules_of(model)]
    places = [place for place in places if isinstance(place, dict)]  # a script's is another at each look
    buffers = [(place, name, own) for place in places for name, own in place.items() if own is not None]
    moved: dict[int, Tensor] = {}
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but this torch ({torch.__version__}) finds no CUDA device")
    if len(homes) > 1:
        spread = ", ".join(sorted(map(str, homes)))
        raise ValueError(f"the model is spread over {spread}; leave device out and it is run where it is")
    try:
        with torch.inference_mode(False):  # what moves in it could enter no backward
            model.to(device)
        for place, name, own in buffers:
            place[name] = moved.setdefault(id(own), place[name])  # torch copies a shared buffer for each module
        yield
    finally:
        kept = [each for each in buffers if not moved or each[0].get(each[1]) is moved[id(each[2])]]
        for home in homes:
            model.to(home)  # not only what was moved: a forward may have cached buffers on the device
        for place, name, own in kept:
            now = place[name]
            if now is not own and _is_plain(own):
                if now.shape != own.shape or not torch.equal(_bytes_of([now]), _bytes_of([own])):
                    _set(own, now)
                place[name] = own
        for parameter, own in data:
            parameter.data = own


_EVERY_MODULE_HAS = frozenset(vars(nn.Module()))  # flags, hooks, parameters, buffers, children
_PLAIN = frozenset({int, float, bool, str, type(None)})  # most attributes: nothing to look into
_COPIED = 256 * 2**20  # bytes of tensors that are copied, the smallest first: quantisers keep more as buffers
_SMALL = 2**20  # bytes of a tensor up to which it is compared together with others, in one row


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Afterwards what forwards leave on a model is as before, for forwards that are only tried.

    Put back: the attributes of its modules; the lists, dicts, sets, dataclasses, namespaces and objects of the model's
    own package among them, with those inside; and the numbers in buffers, in frozen parameters, in other tensors and
    NumPy arrays there, and in random generators of torch, NumPy and Python. Objects of other kinds, as iterators and
    sparse tensors, are not looked into; `mixing_note` tells where they make forwards differ.
    """
    found = _Holdings(model)
    try:
        yield
    finally:
        found.put_back()


@contextmanager
def restored_after_errors(model: nn.Module) -> Iterator[None]:
    """The same if an exception, or Ctrl-C, ends a forward in its middle."""
    found = _Holdings(model)
    try:
        yield
    except BaseException:
        found.put_back()
        raise


class _Holdings:
    """The containers, tensors and generators of a model, each with what was in it."""

    def __init__(self, model: nn.Module) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], frozenset[str]]] = []
        self._others: list[tuple[Any, list[Any]]] = []  # lists, deques and sets
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._generators: list[tuple[Callable[[Any], Any], Any]] = []  # how each is set, and its state
        self._tensors: list[Tensor] = []
        self._seen: set[int] = set()
        self._packages = {_package(type(module)) for module in modules_of(model)} - {"torch"}
        for module in modules_of(model):
            self._keep_dict(vars(module), but=_EVERY_MODULE_HAS)
            self._keep(vars(module).get("_buffers"))
            for parameter in vars(module).get("_parameters", {}).values():
                if parameter is not None and not parameter.requires_grad and parameter.nbytes <= _SMALL:
                    self._keep(parameter)
        # Their numbers as bytes: small tensors of one device in a row, which is copied and compared at once.
        groups: dict[Any, list[Tensor]] = {}
        left = _COPIED
        for tensor in sorted(self._tensors, key=lambda tensor: tensor.nbytes):
            left -= tensor.nbytes
            if left >= 0:
                groups.setdefault(tensor.device if tensor.nbytes <= _SMALL else id(tensor), []).append(tensor)
        self._copies = [
            (group, [tensor.shape for tensor in group], _bytes_of(group).clone()) for group in groups.values()
        ]

    def _keep_dict(self, own: dict[Any, Any], but: frozenset[str] = frozenset()) -> None:
        content = {key: value for key, value in own.items() if key not in but}
        self._dicts.append((own, content, but))
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
        elif isinstance(value, (torch.Generator, np.random.RandomState)):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._generators.append((partial(setattr, bits, "state"), bits.state))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
            own = isinstance(value, SimpleNamespace) or is_dataclass(value) or _package(type(value)) in self._packages
            if own and not callable(value):
                self._seen.add(id(value))
                self._keep_dict(vars(value))
        self._seen.add(id(value))

    def put_back(self) -> None:
        """Only what changed: other threads may be reading the model, and autograd counts what is written."""
        for tensors, shapes, numbers in self._copies:
            same = [tensor.shape for tensor in tensors] == shapes
            if same and torch.equal(_bytes_of(tensors), numbers):  # a GPU is waited for once
                continue
            sizes = [shape.numel() * tensor.element_size() for tensor, shape in zip(tensors, shapes, strict=True)]
            for tensor, shape, was in zip(tensors, shapes, numbers.split(sizes), strict=True):
                if tensor.shape != shape or not torch.equal(_bytes_of([tensor]), was):
                    _set(tensor, was.clone().view(tensor.dtype).view(shape))
        for array, before in self._arrays:
            if not np.array_equal(array, before, equal_nan=array.dtype.kind in "fc"):
                array[...] = before
        for set_state, state in self._generators:
            set_state(state)
        for own, content, but in self._dicts:
            for key in [key for key in own if key not in content and key not in but]:
                del own[key]
            if not but and list(own) != list(content):
                own.clear()  # an order may be read, too
            for key, value in content.items():
                if key not in own or own[key] is not value:
                    own[key] = value
        for other, items in self._others:
            now = list(other)
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                other.clear()
                (other.update if isinstance(other, set) else other.extend)(items)


def _set(tensor: Tensor, numbers: Tensor) -> None:
    """The numbers into the tensor where it is; as its storage if it was given another shape."""
    if tensor.shape != numbers.shape:
        tensor.data = numbers
        return
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:  # one number for the whole axis: torch writes it once only
            tensor, numbers = tensor.narrow(axis, 0, 1), numbers.narrow(axis, 0, 1)
    with torch.inference_mode():  # which may write to a tensor of either kind
        tensor.copy_(numbers)


def _bytes_of(tensors: list[Tensor]) -> Tensor:
    """All numbers of some tensors in a row."""
    flat = (tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in tensors)
    dense = (each if each.stride(0) == 1 else each.clone(memory_format=torch.contiguous_format) for each in flat)
    rows = [each.view(torch.uint8) for each in dense]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _is_plain(tensor: Tensor) -> bool:
    strange = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized
    return type(tensor) in (Tensor, nn.Parameter) and not strange


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
