"""Hooks for training: what a forward shows at its sites, kept with its gradients and only when a step is due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..capture import SilentSite, Site, SiteError, select, unwrap
from ..capture.layout import layout_by_class
from ..capture.names import Names
from ..capture.outputs import first_tensor, tensors_in
from ..capture.sites import label_of
from ..capture.structure import rebuild
from .hooks import Hooks
from .overwritten import Overwritten

Sink = Callable[[Tensor], Any]
COMPILED = (
    " (compiled code that was made before the penalty was attached passes hooks by: attach first, or call "
    "torch.compiler.reset())"
)


class _Fired(NamedTuple):
    """One call of one module, as its hook noted it."""

    tap: int
    is_input: bool
    kept: Any  # None: there was no activation
    shape: tuple[int, ...]
    with_gradients: bool


@dataclass(frozen=True, eq=False)
class Shown:
    """What one site gave, or what went into it."""

    site: Site
    is_input: bool
    value: Any  # the activation, of as many inputs as were asked for, or what the sink made of it

    @property
    def label(self) -> str:
        return f"input of {self.site.label}" if self.is_input else self.site.label


class Taps:
    """Borrowed hooks on one model. Nothing is done in a forward unless `due` is set before it.

    Unlike `watch`, which is for looking, this leaves compiled code on: the hooks are traced with the model, and what
    they do hangs on plain attributes that compiled code looks at. `rows`: the first so many inputs are copied; None:
    the whole activation, itself where nothing overwrites it (learnt from the first forward, which copies) and through
    `sink`, inside the hook: its gradient is then made when the backward comes by, not all sites' at once. `inputs`:
    keep what goes into each site too. `calls`: keep what the model was called with.
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
        self._rows, self._sink, self._calls = rows, sink, calls
        self._reads_input = dict.fromkeys(range(len(self._wanted)), inputs)
        self._handles: list[RemovableHandle] = []
        self._sites: dict[str, Site] | None = None  # what the first forward showed, in its order
        self._entered: dict[str, Site] = {}  # and what goes into sites, by their labels
        self._starts: set[str] = set()  # the sites whose inputs are kept once stages are known
        self._overwritten = Overwritten([label_of(self._names, name, 1) for name in self._wanted])
        self._autocast = "cpu", torch.bfloat16, False
        self.due = False
        self.forget()

    @property
    def asked(self) -> list[str]:
        """The sites by name, with the calls that are meant where not all are."""
        return [name if each.calls is None else f"{name}@{sorted(each.calls)}" for name, each in self._wanted.items()]

    # The forward

    def open(self) -> None:
        whole = Hooks(self)
        self._handles.append(self.root.register_forward_pre_hook(whole.begin, prepend=True, with_kwargs=True))
        for k, wanted in enumerate(self._wanted.values()):
            own = Hooks(self, k)
            if self._reads_input[k]:
                self._handles.append(wanted.module.register_forward_pre_hook(own.enter, with_kwargs=True))
            self._handles.append(wanted.module.register_forward_hook(own.fire))
        self._handles.append(self.root.register_forward_hook(whole.finish))

    def close(self) -> None:
        self.due = False  # compiled code keeps the hooks it was traced with: this makes them do nothing
        while self._handles:
            self._handles.pop().remove()
        self.forget()

    def forget(self) -> None:
        """Drop what the last forward left, and its graph."""
        self._active, self.complete = False, False
        self._fired: list[_Fired] = []
        self._overwritten.forget()
        self._last: tuple[Tensor, int, Any] | None = None
        self.called: tuple[Any, Any] | None = None
        self.count = 0

    def begins(self, args: Any, kwargs: Any) -> None:
        if not self.due:
            return
        self.forget()
        self._active = True
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not first.dim():  # else there is nothing to look for
            first = next((each for each in tensors_in((args, kwargs)) if each.dim()), None)
        self.count = 0 if first is None else first.shape[0]
        if self._calls:
            self.called = rebuild(self._part, (tuple(args), dict(kwargs)))
            device = "cpu" if first is None else first.device.type
            self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Under the autocast that the last forward ran under."""
        device, dtype, enabled = self._autocast
        with torch.autocast(device, dtype, enabled=enabled):
            yield

    def _part(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != self.count:
            return leaf
        return leaf.detach()[: self._rows].clone()

    def enters(self, site: int, args: Any, kwargs: Any) -> None:
        if self._active and self._reads_input[site]:
            self._note(site, True, args[0] if args and isinstance(args[0], Tensor) else (args, kwargs))

    def fires(self, site: int, output: Any) -> None:
        if self._active:
            self._note(site, False, output)

    def finishes(self) -> None:
        if self._active:
            self._active, self.complete, self._last = False, True, None

    def _note(self, k: int, is_input: bool, given: Any) -> None:
        found = given if isinstance(given, Tensor) else first_tensor(given)
        if found is None or not found.is_floating_point() or found.is_nested:
            self._fired.append(_Fired(k, is_input, None, (), True))
            return
        kept = self._kept((k, is_input), found)
        self._fired.append(_Fired(k, is_input, kept, tuple(found.shape), torch.is_grad_enabled()))

    def _kept(self, key: tuple[int, bool], found: Tensor) -> Any:
        if not found.dim():
            return found  # no rows; `take` refuses it where it is asked for
        if torch.compiler.is_compiling():
            # Compiled code knows what is overwritten when, so a sink may have the tensor itself.
            if self._rows is None and self._sink is not None and len(found):
                return self._sink(found)
            return found[: self._rows].clone()
        version = -1 if found.is_inference() else found._version
        if self._last is not None and self._last[0] is found and self._last[1] == version >= 0:
            return self._last[2]  # what the layer before gave is what goes into this one
        kept: Any = found
        if self._rows is not None:
            kept = found[: self._rows].clone()
        else:
            if version < 0 or self._overwritten.may_be(key, self.root.training):
                kept = found.clone()
            if version >= 0:
                self._overwritten.look_at(key, found)
            if self._sink is not None and len(found):
                with self._overwritten.noticed(key, self.root.training):
                    kept = self._sink(kept)
        self._last = (found, version, kept)
        return kept

    # What it showed

    def take(self) -> list[Shown]:
        """In execution order; the copies are the caller's from here on."""
        if not self.complete:
            raise RuntimeError(self._why_nothing())
        self._overwritten.check(self.root.training)
        found = list(self._shown())
        outputs = {shown.site.label: shown.site for shown in found if not shown.is_input}
        if self._sites is None:
            self._check_silent()
            self._sites = outputs
        elif missing := [label for label in self._sites if label not in outputs]:
            raise SilentSite(f"fired in the first forward but not in this one: {', '.join(missing)}")
        elif new := [label for label in outputs if label not in self._sites]:
            raise SiteError(
                f"site {new[0]!r} fired now but not in the first forward: the model's path depends on its input. Name "
                "the sites that every input passes"
            )
        return found

    def read_inputs_of(self, labels: set[str], *, lacking: set[str]) -> None:
        """From now on keep what goes into these sites only, and refuse a step that lacks what went into others."""
        passed_by = lacking & self._entered.keys()  # others have no input that could be kept
        self._starts |= labels | passed_by
        for k, name in enumerate(self._wanted):
            calls = self._every_call(name)
            self._reads_input[k] = any(label_of(self._names, name, call) in self._starts for call in calls)
        if passed_by:
            raise SiteError(
                f"with inputs of this size a stage begins at site {min(passed_by)!r}, as none did before, and what "
                "goes into it was not kept; run the step again (it will be)"
            )

    def _every_call(self, name: str) -> list[int]:
        return [site.call for site in (self._sites or {}).values() if site.module_name == name]

    def _shown(self) -> Iterator[Shown]:
        names = list(self._wanted)
        calls: Counter[tuple[int, bool]] = Counter()
        for fired in self._fired:
            name = names[fired.tap]
            calls[fired.tap, fired.is_input] += 1
            call, wanted = calls[fired.tap, fired.is_input], self._wanted[name]
            if wanted.calls is not None and call not in wanted.calls:
                continue
            label = label_of(self._names, name, call)
            if fired.kept is None:
                if not fired.is_input and call in wanted.required:
                    raise SiteError(f"site {label!r} ({type(wanted.module).__name__}) gave no floating-point tensor")
                continue
            self._check(label, fired)
            yield Shown(self._site(label, name, call, fired), fired.is_input, fired.kept)

    def _check(self, label: str, fired: _Fired) -> None:
        where = f"the input of site {label!r}" if fired.is_input else f"site {label!r}"
        if torch.is_grad_enabled() and not fired.with_gradients:
            raise SiteError(
                f"{where} fired under no_grad, so no gradient can flow from it: run the forward with gradients, and "
                "checkpoint with use_reentrant=False"
            )
        if not fired.shape or fired.shape[0] != self.count:
            raise SiteError(
                f"{where} has shape {fired.shape} for {self.count} inputs: its first dimension does not count them"
            )
        if self._rows is not None and self.count < self._rows:
            raise ValueError(
                f"a batch of {self.count} inputs is smaller than rows={self._rows}: ask for fewer rows, or leave the "
                "short last batch out"
            )

    def _site(self, label: str, name: str, call: int, fired: _Fired) -> Site:
        known = (self._entered if fired.is_input else self._sites or {}).get(label)
        if known is not None and known.shape == fired.shape[1:]:
            return known
        found = Site(label, name, call, fired.shape[1:], layout_by_class(self._names, name, fired.shape))
        if fired.is_input:
            self._entered[label] = found
        return found

    def _check_silent(self) -> None:
        fired = [fired.tap for fired in self._fired if not fired.is_input]
        silent = [
            f"{label_of(self._names, name, call)!r} ({type(wanted.module).__name__}, called {fired.count(k)} times)"
            for k, (name, wanted) in enumerate(self._wanted.items())
            for call in sorted(wanted.required)
            if call > fired.count(k)
        ]
        if silent:
            raise SilentSite(
                f"sites that never fired: {', '.join(silent)}; name a module that the forward calls{COMPILED}"
            )
        if not any(each.kept is not None for each in self._fired if not each.is_input):
            raise SilentSite(f"none of the sites gave an activation: name others{COMPILED}")

    def _why_nothing(self) -> str:
        if self._fired:
            return "the last forward did not finish, so there is nothing to read: run it again"
        return f"no forward has finished since the last step: call the model first{COMPILED}"
