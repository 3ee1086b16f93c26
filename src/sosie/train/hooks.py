"""Hooks for training: the activations of a forward, with their gradients, kept only when a step is due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..capture import SilentSite, Site, SiteError, as_found, select, unwrap
from ..capture.batches import rebuild
from ..capture.layout import layout_by_class
from ..capture.sites import Names, first_tensor, label_of, tensors_in

Sink = Callable[[Tensor], Any]
Key = tuple[int, bool]  # the number of a site, and whether it is its input
AGAIN = "run the step again (it will be copied)"
COMPILED = (
    " (code that was compiled before the penalty was attached skips its hooks: attach first, or call "
    "torch.compiler.reset())"
)


@dataclass(frozen=True, eq=False)
class SiteValue:
    """The value of a forward at one site: its output, or its input."""

    site: Site
    is_input: bool
    value: Any  # the activation of the first `rows` inputs, or what the sink made of it
    label: str  # its name among those of other models


class _Call(NamedTuple):
    """One call of one module, recorded by its hook."""

    number: int  # of the site
    is_input: bool
    kept: Any  # None: there was no activation
    shape: tuple[int, ...]
    with_gradients: bool


class Hook:
    """Calls `report` with a hook's arguments after the module. The hook of a copied or pickled model does nothing.

    Models are copied while a penalty is attached (an average of the weights, a file of the best model so far), and the
    penalty must not read the activations of the copies.
    """

    def __init__(self, report: Callable[[Any, Any], None] | None = None) -> None:
        self.report = report

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def __call__(self, module: nn.Module, args: Any, other: Any) -> None:
        if self.report is not None:
            self.report(args, other)


class ActivationHooks:
    """Borrowed hooks on one model. They do nothing in a forward unless `due` is set before it.

    Unlike `watch`, this leaves compiled code on: the hooks are traced with the model, and depend on plain attributes
    that compiled code reads. `rows`: only this many inputs, the first, are kept, as copies. None: the whole activation,
    passed through `sink` inside the hook, so that its gradient is computed when the backward reaches that site and not
    for all sites at once. It is copied only if the model overwrites it in place; the first forward in training and in
    evaluation mode copies, to learn which. `inputs`: also keep the inputs of sites. `calls`: keep the arguments of the
    model.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Any,
        *,
        rows: int | None = None,
        sink: Sink | None = None,
        inputs: bool = False,
        calls: bool = False,
    ) -> None:
        if isinstance(model, nn.DataParallel):
            raise ValueError("DataParallel runs copies of the model in threads: use DistributedDataParallel")
        self.model, self.root = model, unwrap(model)
        self._names = Names.of(self.root)
        self._requests = select(model, sites)
        self._site_labels = [label_of(self._names, name, 1) for name in self._requests]
        self._rows, self._sink, self._reads_inputs, self._keeps_arguments = rows, sink, inputs, calls
        self._handles: list[RemovableHandle] = []
        self._labels: list[str] | None = None  # the sites of the first forward, in its order
        self._sites: dict[tuple[str, bool], Site] = {}  # by label, and whether it is the input
        self._overwritten: dict[bool, set[Key]] = {}  # by training mode: what the model changed in place after reading
        self._autocast = "cpu", torch.bfloat16, False
        self.due = False
        self.forget()

    @property
    def requested(self) -> list[str]:
        """The sites by name, with the calls where only some were named."""
        return [name if each.calls is None else f"{name}@{sorted(each.calls)}" for name, each in self._requests.items()]

    def open(self) -> None:
        begin = self.root.register_forward_pre_hook(Hook(self._begin), prepend=True, with_kwargs=True)
        self._handles.append(begin)
        for number, request in enumerate(self._requests.values()):
            if self._reads_inputs:
                hook = Hook(partial(self._record, number, True))
                self._handles.append(request.module.register_forward_pre_hook(hook, with_kwargs=True))
            self._handles.append(request.module.register_forward_hook(Hook(partial(self._record, number, False))))
        self._handles.append(self.root.register_forward_hook(Hook(self._finish)))

    def close(self) -> None:
        self.due = False  # compiled code keeps the hooks it was traced with: this makes them do nothing
        while self._handles:
            self._handles.pop().remove()
        self.forget()

    def forget(self) -> None:
        """Drop the activations of the last forward, and its graph."""
        self._active, self.complete = False, False
        self._calls: list[_Call] = []
        self._live: list[tuple[Key, Tensor, int]] = []  # activations that were not copied, and their versions
        self._last: tuple[Tensor, int, Any] | None = None
        self._called: tuple[Any, Any] | None = None
        self.count = 0

    # The forward

    def _begin(self, args: Any, kwargs: Any) -> None:
        if not self.due:
            return
        self.forget()
        self._active = True
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not first.dim():
            first = next((tensor for tensor in tensors_in((args, kwargs)) if tensor.dim()), None)
        self.count = 0 if first is None else first.shape[0]
        if self._keeps_arguments:
            self._called = rebuild(self._part, (tuple(args), dict(kwargs)))
            device = "cpu" if first is None else first.device.type
            self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    @contextmanager
    def as_called(self, other: nn.Module) -> Iterator[tuple[Any, Any]]:
        """Yield the arguments of the last forward, to run another model on them under the same autocast."""
        device, dtype, enabled = self._autocast
        with as_found(other), torch.autocast(device, dtype, enabled=enabled):
            yield self._called or ((), {})

    def _part(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != self.count:
            return leaf
        return leaf.detach()[: self._rows].clone()

    def _finish(self, args: Any, output: Any) -> None:
        if self._active:
            self._active, self.complete, self._last = False, True, None

    def _record(self, number: int, is_input: bool, args: Any, other: Any) -> None:
        """Record a call of a module: `other` is its output, or for the input its keyword arguments."""
        if not self._active:
            return
        value = other
        if is_input:
            value = args[0] if args and isinstance(args[0], Tensor) else (args, other)
        activation = value if isinstance(value, Tensor) else first_tensor(value)
        if activation is None or not activation.is_floating_point() or activation.is_nested:
            self._calls.append(_Call(number, is_input, None, (), True))
            return
        kept = self._keep((number, is_input), activation)
        self._calls.append(_Call(number, is_input, kept, tuple(activation.shape), torch.is_grad_enabled()))

    def _keep(self, key: Key, activation: Tensor) -> Any:
        if not activation.dim():
            return activation  # it has no rows: `take` raises if the site was named
        if torch.compiler.is_compiling():
            # Compiled code knows what is overwritten when, so a sink may have the tensor itself.
            if self._rows is None and self._sink is not None and len(activation):
                return self._sink(activation)
            return activation[: self._rows].clone()
        version = -1 if activation.is_inference() else activation._version
        if self._last is not None and self._last[0] is activation and self._last[1] == version >= 0:
            return self._last[2]  # the output of the layer before is the input of this one
        kept: Any = activation
        if self._rows is not None:
            kept = activation[: self._rows].clone()
        else:
            overwritten = self._overwritten.get(self.root.training)
            if version < 0 or overwritten is None or key in overwritten:
                kept = activation.clone()
            if version >= 0:
                self._live.append((key, activation, version))
            if self._sink is not None and len(activation):
                with self._checked_in_backward(key):
                    kept = self._sink(kept)
        self._last = (activation, version, kept)
        return kept

    def _check_overwritten(self) -> None:
        """After a forward: learn what it overwrote in place, and raise if that was read without a copy."""
        changed = {key for key, live, version in self._live if live._version != version}
        known = self._overwritten.get(self.root.training)
        new = set() if known is None else changed - known
        # The same set: backward graphs add to it.
        self._overwritten.setdefault(self.root.training, set()).update(changed)
        self._live.clear()
        if new:
            name = self._name(min(new))
            raise SiteError(f"{name} was changed in place, which it was not in the first forward; {AGAIN}")

    def _checked_in_backward(self, key: Key) -> AbstractContextManager[None]:
        """Let the backward raise if a tensor that is saved inside has been changed in place.

        Torch checks versions of saved tensors only where there are no hooks; these hooks keep out those of
        checkpointing, whose second forward does not reach ours. The graph holds these functions, so they must not hold
        this object, which holds the graph.
        """
        name, overwritten = self._name(key), self._overwritten.get(self.root.training, set())

        def unpack(saved: tuple[Tensor, int]) -> Tensor:
            tensor, version = saved
            if tensor._version != version:
                overwritten.add(key)
                raise SiteError(f"{name} was changed in place after penalty() read it: its gradient is lost; {AGAIN}")
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, tensor._version), unpack)

    def _name(self, key: Key) -> str:
        number, is_input = key
        return f"the {'input' if is_input else 'output'} of site {self._site_labels[number]!r}"

    # Reading

    def take(self) -> list[SiteValue]:
        """The values of the last forward, in execution order; the copies belong to the caller from here on."""
        if not self.complete and self._calls:
            raise RuntimeError("the last forward did not finish, so there is nothing to read: run it again")
        if not self.complete:
            raise RuntimeError(f"no forward has finished since the last step: call the model first{COMPILED}")
        self._check_overwritten()
        values = list(self._values())
        labels = [value.site.label for value in values if not value.is_input]
        if self._labels is None:
            self._check_silent()
            self._labels = labels
        elif missing := [label for label in self._labels if label not in labels]:
            raise SilentSite(f"fired in the first forward but not in this one: {', '.join(missing)}")
        elif new := [label for label in labels if label not in self._labels]:
            raise SiteError(
                f"site {new[0]!r} fired now but not in the first forward: the model's path depends on its input. Name "
                "sites that every input passes"
            )
        return values

    def _values(self) -> Iterator[SiteValue]:
        names = list(self._requests)
        counts: Counter[Key] = Counter()
        for recorded in self._calls:
            name = names[recorded.number]
            counts[recorded.number, recorded.is_input] += 1
            call, request = counts[recorded.number, recorded.is_input], self._requests[name]
            if request.calls is not None and call not in request.calls:
                continue
            label = label_of(self._names, name, call)
            if recorded.kept is None:
                if not recorded.is_input and call in request.required:
                    raise SiteError(f"site {label!r} ({type(request.module).__name__}) gave no floating-point tensor")
                continue
            self._check(f"the input of site {label!r}" if recorded.is_input else f"site {label!r}", recorded)
            site = self._sites.get((label, recorded.is_input))
            if site is None or site.shape != recorded.shape[1:]:
                layout = layout_by_class(self._names, name, recorded.shape)
                site = self._sites[label, recorded.is_input] = Site(label, name, call, recorded.shape[1:], layout)
            shown = f"input of {label}" if recorded.is_input else label
            yield SiteValue(site, recorded.is_input, recorded.kept, shown)

    def _check(self, where: str, recorded: _Call) -> None:
        if torch.is_grad_enabled() and not recorded.with_gradients:
            raise SiteError(
                f"{where} fired under no_grad, so no gradient can flow from it: run the forward with gradients, and "
                "checkpoint with use_reentrant=False"
            )
        if not recorded.shape or recorded.shape[0] != self.count:
            raise SiteError(f"{where} has shape {recorded.shape}: the first dimension must count {self.count} inputs")
        if self._rows is not None and self.count < self._rows:
            raise ValueError(
                f"a batch of {self.count} inputs is smaller than rows={self._rows}: take fewer rows, or leave out the "
                "short last batch"
            )

    def _check_silent(self) -> None:
        outputs = [recorded for recorded in self._calls if not recorded.is_input]
        called = Counter(recorded.number for recorded in outputs)
        silent = [
            f"{label_of(self._names, name, call)!r} ({type(request.module).__name__}, called {called[k]} times)"
            for k, (name, request) in enumerate(self._requests.items())
            for call in sorted(request.required)
            if call > called[k]
        ]
        if silent:
            raise SilentSite(f"sites that never fired: {', '.join(silent)}; name modules that are called{COMPILED}")
        if all(recorded.kept is None for recorded in outputs):
            raise SilentSite(f"none of the sites gave an activation: name others{COMPILED}")
