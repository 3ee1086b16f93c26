"""Hooks for training: the activations of a forward, with their gradients, kept only when a step is due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    """What a forward showed at one site: its output, or its input."""

    site: Site
    is_input: bool
    value: Any  # the activation of the first `rows` inputs, or what the sink made of it
    label: str  # its name among those of other models


class _Call(NamedTuple):
    """One call of one module, as its hook noted it."""

    number: int  # of the site
    is_input: bool
    kept: Any  # None: there was no activation
    shape: tuple[int, ...]
    with_gradients: bool


class Hook:
    """Calls `report` with a hook's arguments after the module. The hook of a copied or pickled model does nothing.

    Copies are made while a penalty is attached (an average of the weights, a file of the best model so far), and the
    penalty must not see their activations.
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


class InPlaceChanges:
    """Which activations a model overwrites in place after they were read, by training mode; learnt as it runs.

    Such an activation is copied once that is known; before that, it raises.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._known: dict[bool, set[Key]] = {}
        self.forget()

    def forget(self) -> None:
        """Drop the tensors of the last forward."""
        self._live: list[tuple[Key, Tensor, int]] = []

    def must_copy(self, key: Key, training: bool) -> bool:
        """Whether it was overwritten before, or this is the first forward."""
        return training not in self._known or key in self._known[training]

    def follow(self, key: Key, activation: Tensor) -> None:
        self._live.append((key, activation, activation._version))

    def check(self, training: bool) -> None:
        """After a forward: learn what it overwrote, and raise if that was read without a copy."""
        changed = {key for key, live, version in self._live if live._version != version}
        known = self._known.get(training)
        new = set() if known is None else changed - known
        self._known.setdefault(training, set()).update(changed)  # the same set: backward graphs add to it
        self._live.clear()
        if new:
            raise SiteError(
                f"{self._name(min(new))} was changed in place, which it was not in the first forward; {AGAIN}"
            )

    def checked_in_backward(self, key: Key, training: bool) -> AbstractContextManager[None]:
        """Let the backward raise if a tensor that is saved inside has been changed in place.

        Torch checks versions of saved tensors only where there are no hooks; hooks of our own keep those of
        checkpointing out, whose second forward does not reach ours. The graph holds these functions, so they must not
        hold this object, whose owner holds the graph.
        """
        name, overwritten = self._name(key), self._known.get(training, set())

        def unpack(saved: tuple[Tensor, int]) -> Tensor:
            tensor, version = saved
            if tensor._version != version:
                overwritten.add(key)
                raise SiteError(
                    f"{name} was changed in place after penalty() had read it, so that its gradient is lost; {AGAIN}"
                )
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, tensor._version), unpack)

    def _name(self, key: Key) -> str:
        number, is_input = key
        return f"the {'input' if is_input else 'output'} of site {self._labels[number]!r}"


class ActivationHooks:
    """Borrowed hooks on one model. They do nothing in a forward unless `due` is set before it.

    Unlike `watch`, this leaves compiled code on: the hooks are traced with the model, and depend on plain attributes
    that compiled code reads. `rows`: only the first so many inputs are kept, as copies; None: the whole activation,
    without a copy where nothing overwrites it (learnt from the first forward, which copies) and passed through `sink`
    inside the hook, so that its gradient is computed when the backward reaches that site, not for all sites at once.
    `inputs`: keep the inputs of sites too, see `keep_inputs_of`. `calls`: keep the arguments the model was called with.
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
        self._wanted = select(model, sites)
        self._rows, self._sink, self._reads_inputs, self._keeps_arguments = rows, sink, inputs, calls
        self._handles: list[RemovableHandle] = []
        self._labels: list[str] | None = None  # the sites of the first forward, in its order
        self._sites: dict[tuple[str, bool], Site] = {}  # by label, and whether it is the input
        self._size: tuple[int, ...]  # of what the model is called with, without its first dimension
        self._usual_size: tuple[int, ...] | None = None  # that of the first forward, once `_starts` are known
        self._starts: set[int] = set()  # the sites whose inputs are kept where the size is the usual one
        self._changes = InPlaceChanges([label_of(self._names, name, 1) for name in self._wanted])
        self._autocast = "cpu", torch.bfloat16, False
        self.due = False
        self.forget()

    @property
    def asked(self) -> list[str]:
        """The sites by name, with the calls where only some were named."""
        return [name if each.calls is None else f"{name}@{sorted(each.calls)}" for name, each in self._wanted.items()]

    def open(self) -> None:
        begin = self.root.register_forward_pre_hook(Hook(self._begin), prepend=True, with_kwargs=True)
        self._handles.append(begin)
        for number, wanted in enumerate(self._wanted.values()):
            if self._reads_inputs:
                hook = Hook(partial(self._note, number, True))
                self._handles.append(wanted.module.register_forward_pre_hook(hook, with_kwargs=True))
            self._handles.append(wanted.module.register_forward_hook(Hook(partial(self._note, number, False))))
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
        self._changes.forget()
        self._last: tuple[Tensor, int, Any] | None = None
        self._called: tuple[Any, Any] | None = None
        self.count, self._size, self._every_input = 0, (), True

    # The forward

    def _begin(self, args: Any, kwargs: Any) -> None:
        if not self.due:
            return
        self.forget()
        self._active = True
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not first.dim():  # else there is nothing to look for
            first = next((each for each in tensors_in((args, kwargs)) if each.dim()), None)
        self.count = 0 if first is None else first.shape[0]
        self._size = () if first is None else tuple(first.shape[1:])
        self._every_input = self._size != self._usual_size
        if self._keeps_arguments:
            self._called = rebuild(self._part, (tuple(args), dict(kwargs)))
            device = "cpu" if first is None else first.device.type
            self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    @contextmanager
    def as_called(self, other: nn.Module) -> Iterator[tuple[Any, Any]]:
        """The arguments of the last forward, to run another model as found on them, under the same autocast."""
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

    def _note(self, number: int, is_input: bool, args: Any, other: Any) -> None:
        """Note a call of a module: `other` is its output, or for the input its keyword arguments."""
        if not self._active or (is_input and not self._every_input and number not in self._starts):
            return
        given = other
        if is_input:
            given = args[0] if args and isinstance(args[0], Tensor) else (args, other)
        activation = given if isinstance(given, Tensor) else first_tensor(given)
        if activation is None or not activation.is_floating_point() or activation.is_nested:
            self._calls.append(_Call(number, is_input, None, (), True))
            return
        kept = self._keep((number, is_input), activation)
        self._calls.append(_Call(number, is_input, kept, tuple(activation.shape), torch.is_grad_enabled()))

    def _keep(self, key: Key, activation: Tensor) -> Any:
        if not activation.dim():
            return activation  # no rows: `take` raises where the site was named
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
            if version < 0 or self._changes.must_copy(key, self.root.training):
                kept = activation.clone()
            if version >= 0:
                self._changes.follow(key, activation)
            if self._sink is not None and len(activation):
                with self._changes.checked_in_backward(key, self.root.training):
                    kept = self._sink(kept)
        self._last = (activation, version, kept)
        return kept

    # What it showed

    def take(self) -> list[SiteValue]:
        """What the last forward showed, in execution order; the copies are the caller's from here on."""
        if not self.complete and self._calls:
            raise RuntimeError("the last forward did not finish, so there is nothing to read: run it again")
        if not self.complete:
            raise RuntimeError(f"no forward has finished since the last step: call the model first{COMPILED}")
        self._changes.check(self.root.training)
        values = list(self._values())
        labels = [each.site.label for each in values if not each.is_input]
        if self._labels is None:
            self._check_silent()
            self._labels = labels
        elif missing := [label for label in self._labels if label not in labels]:
            raise SilentSite(f"fired in the first forward but not in this one: {', '.join(missing)}")
        elif new := [label for label in labels if label not in self._labels]:
            raise SiteError(
                f"site {new[0]!r} fired now but not in the first forward: the model's path depends on its input. Name "
                "the sites that every input passes"
            )
        return values

    def keep_inputs_of(self, sites: Sequence[SiteValue]) -> None:
        """From now on keep the inputs of these sites only. Where the model is called with another size, all are kept.

        A single size counts as usual, since compiled code is compiled again for every change of it. Raises if one of
        the sites has an input that the last forward did not keep.
        """
        if self._usual_size is None:
            self._usual_size = self._size
        if self._size != self._usual_size:
            return
        names = list(self._wanted)
        self._starts.update(names.index(each.site.module_name) for each in sites)
        # Sites that are not in `_sites` have no input that could be kept.
        missed = [each.site.label for each in sites if not each.is_input and (each.site.label, True) in self._sites]
        if missed:
            raise SiteError(
                f"a stage begins at site {missed[0]!r}, which it did not before with inputs of this size, and its "
                "input was not kept; run the step again (it will be)"
            )

    def _values(self) -> Iterator[SiteValue]:
        names = list(self._wanted)
        counts: Counter[Key] = Counter()
        for noted in self._calls:
            name = names[noted.number]
            counts[noted.number, noted.is_input] += 1
            call, wanted = counts[noted.number, noted.is_input], self._wanted[name]
            if wanted.calls is not None and call not in wanted.calls:
                continue
            label = label_of(self._names, name, call)
            if noted.kept is None:
                if not noted.is_input and call in wanted.required:
                    raise SiteError(f"site {label!r} ({type(wanted.module).__name__}) gave no floating-point tensor")
                continue
            where = f"the input of site {label!r}" if noted.is_input else f"site {label!r}"
            self._check(where, noted)
            site = self._sites.get((label, noted.is_input))
            if site is None or site.shape != noted.shape[1:]:
                site = Site(label, name, call, noted.shape[1:], layout_by_class(self._names, name, noted.shape))
                self._sites[label, noted.is_input] = site
            yield SiteValue(site, noted.is_input, noted.kept, f"input of {label}" if noted.is_input else label)

    def _check(self, where: str, noted: _Call) -> None:
        if torch.is_grad_enabled() and not noted.with_gradients:
            raise SiteError(
                f"{where} fired under no_grad, so no gradient can flow from it: run the forward with gradients, and "
                "checkpoint with use_reentrant=False"
            )
        if not noted.shape or noted.shape[0] != self.count:
            raise SiteError(
                f"{where} has shape {noted.shape} for {self.count} inputs: its first dimension does not count them"
            )
        if self._rows is not None and self.count < self._rows:
            raise ValueError(
                f"a batch of {self.count} inputs is smaller than rows={self._rows}: ask for fewer rows, or leave the "
                "short last batch out"
            )

    def _check_silent(self) -> None:
        called = [noted.number for noted in self._calls if not noted.is_input]
        silent = [
            f"{label_of(self._names, name, call)!r} ({type(wanted.module).__name__}, called {called.count(k)} times)"
            for k, (name, wanted) in enumerate(self._wanted.items())
            for call in sorted(wanted.required)
            if call > called.count(k)
        ]
        if silent:
            raise SilentSite(
                f"sites that never fired: {', '.join(silent)}; name a module that the forward calls{COMPILED}"
            )
        if not any(noted.kept is not None for noted in self._calls if not noted.is_input):
            raise SilentSite(f"none of the sites gave an activation: name others{COMPILED}")
