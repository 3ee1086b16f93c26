"""Leaving models and the global random state as they were found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..process_state import held, kept_random_state
from .sites import modules_of, parameters_of


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
    """Afterwards each flag as before."""
    training = [(module, module.training) for module in modules]
    requires_grad = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        yield
    finally:
        for module, flag in training:
            if module.training != flag:
                module.training = flag  # not train(flag): it would go through the children, and may be overridden
        for parameter, flag in requires_grad:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


@contextmanager
def _placement(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on a device; afterwards its parameters have their own storage again, not a copy."""
    if device.type == "meta":
        raise ValueError("the meta device holds no numbers: name a device that computes")
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but this torch ({torch.__version__}) finds no CUDA device")
    if len(homes) > 1:
        spread = ", ".join(sorted(map(str, homes)))
        raise ValueError(f"the model is spread over {spread}; leave device out and it is run where it is")
    try:
        model.to(device)
        yield
    finally:
        for home in homes:
            model.to(home)  # not only what was moved: a forward may have cached buffers on the device
        for parameter, own in data:
            parameter.data = own


_EVERY_MODULE_HAS = frozenset(vars(nn.Module()))  # flags, hooks, parameters, buffers, children
_PLAIN = frozenset({int, float, bool, str, type(None)})  # most attributes: nothing to look into
_LARGE = 64 * 2**20  # bytes of a tensor from which it is not copied: weights that a quantiser keeps as buffers


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Afterwards what forwards leave on a model is as before, for forwards that are only tried.

    Put back: the attributes of its modules; the lists, dicts and sets among them, with those inside; and the numbers in
    buffers and in other tensors there that are no parameters. Objects of other kinds are not looked into.
    """
    found = _Holdings(model)
    try:
        yield
    finally:
        found.put_back()


@contextmanager
def restored_after_errors(model: nn.Module) -> Iterator[None]:
    """Attributes, lists, dicts and sets as before if an exception, or Ctrl-C, ends a forward in its middle."""
    found = _Holdings(model, numbers=False)
    try:
        yield
    except BaseException:
        found.put_back()
        raise


class _Holdings:
    """The containers and tensors of a model, each with what was in it."""

    def __init__(self, model: nn.Module, *, numbers: bool = True) -> None:
        self._numbers = numbers
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], frozenset[str]]] = []
        self._others: list[tuple[Any, list[Any]]] = []  # lists, deques and sets
        self._tensors: dict[torch.device, list[Tensor]] = {}
        self._seen: set[int] = set()
        for module in modules_of(model):
            self._keep_dict(vars(module), but=_EVERY_MODULE_HAS)
            self._keep(vars(module).get("_buffers"))
        self._bytes = {device: _bytes_of(tensors) for device, tensors in self._tensors.items()}

    def _keep_dict(self, own: dict[Any, Any], but: frozenset[str] = frozenset()) -> None:
        content = {key: value for key, value in own.items() if key not in but}
        self._dicts.append((own, content, but))
        for value in content.values():
            if type(value) not in _PLAIN:
                self._keep(value)

    def _keep(self, value: Any) -> None:
        if not isinstance(value, (Tensor, dict, list, tuple, set, deque)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            strange = type(value) is not Tensor or value.layout is not torch.strided
            plain = not (strange or value.is_meta or value.is_quantized)
            if self._numbers and plain and value.nbytes < _LARGE:
                self._tensors.setdefault(value.device, []).append(value)
        elif isinstance(value, dict):
            self._keep_dict(value)
        else:
            if not isinstance(value, tuple):
                self._others.append((value, list(value)))
            for item in value:
                if type(item) not in _PLAIN:
                    self._keep(item)

    def put_back(self) -> None:
        """Only what changed: other threads may be reading the model, and autograd counts what is written."""
        for device, tensors in self._tensors.items():
            if torch.equal(_bytes_of(tensors), self._bytes[device]):  # a GPU is waited for once
                continue
            before = self._bytes[device].split([tensor.nbytes for tensor in tensors])
            with torch.inference_mode():  # which may write to a tensor of either kind
                for tensor, was in zip(tensors, before, strict=True):
                    if not torch.equal(_bytes_of([tensor]), was):
                        tensor.copy_(was.clone().view(tensor.dtype).view(tensor.shape))
        for own, content, but in self._dicts:
            for key in [key for key in own if key not in content and key not in but]:
                del own[key]
            for key, value in content.items():
                if key not in own or own[key] is not value:
                    own[key] = value
        for other, items in self._others:
            now = list(other)
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                other.clear()
                (other.update if isinstance(other, set) else other.extend)(items)


def _bytes_of(tensors: list[Tensor]) -> Tensor:
    """All numbers of some tensors in a row: one copy and one comparison instead of hundreds."""
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
