"""Watching a model: borrowed hooks that hand over activations as the forward makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..checks import nearest
from ..process_state import Shared, attention_in_parts, held, without_autocast
from .arguments import CallArguments
from .layout import FeatureAxes
from .sites import (
    Names,
    NoRows,
    SilentSite,
    Site,
    SiteError,
    SiteRequest,
    find_name,
    is_compiled,
    is_script,
    label_of,
    modules_of,
    selected,
    unwrap,
)
from .structure import activation_in

# Keeping activations whole: a later in-place operation must not change what was seen


class Keep:
    """The sink that keeps the activation itself, cloned only where the model overwrites it.

    The first forward clones everything and learns from the tensors' version counters which sites are
    overwritten; afterwards only those are cloned.
    """

    def __init__(self) -> None:
        self._overwritten: set[str] | None = None  # None until the first forward is over
        self.start()

    def start(self) -> None:
        self._live: list[tuple[str, Tensor, int]] = []
        self._versions: dict[str, int] = {}

    def __call__(self, site: Site, activation: Tensor) -> Tensor:
        if activation.is_inference():
            # No version counter, and an inference tensor could not enter a later backward: a clone can.
            with torch.inference_mode(False), torch.no_grad():
                return activation.clone()
        if self._overwritten is None:
            self._live.append((site.label, activation, activation._version))
            return activation.clone()
        if site.label in self._overwritten:
            return activation.clone()
        self._versions[site.label] = activation._version
        return activation

    def learn(self) -> None:
        """Called when a forward is over."""
        if self._overwritten is None:
            self._overwritten = {label for label, live, version in self._live if live._version != version}
        self._live.clear()

    def check(self, label: str, kept: Tensor) -> None:
        """Refuse to hand over a tensor that was changed although it had not been in the first forward."""
        version = self._versions.get(label)
        if version is not None and kept._version != version:
            if self._overwritten is not None:
                self._overwritten.add(label)
            raise SiteError(
                f"the activation of site {label!r} was changed in place after it was captured; "
                "run the forward again (it will be cloned), and change the model's output only after reading"
            )


Sink = Callable[[Site, Tensor], Any]

# Whose run() is under way: with one model watched twice, only that watch may fill.
_RUNNING: ContextVar[Watch | None] = ContextVar("sosie_running_watch", default=None)


@contextmanager
def watch(model: nn.Module, sites: Any = None, *, sink: Sink | None = None, axes: bool = True) -> Iterator[Watch]:
    """Record the activations of a model's forward at these sites (see `select`), as long as the block lasts.

    `sink(site, activation)` is called inside the hook, out of autocast, and what it returns is kept instead
    of the activation; it gets the live tensor, before any later in-place operation, and must not change it. What it
    raises ends the watch's part in the forward, and is raised when the forward is over: the model itself always ends.
    Without a sink the activation is kept, cloned where the model overwrites it. Attention's fused inference
    path and compiled code, both of which pass hooks by, are off inside the block. Another thread that wants the model
    meanwhile waits. `axes=False`: which dimension holds the features is not looked for, which makes the first forward
    faster, and `Site.channels_last` is None.
    """
    seen = Watch(model, sites, sink, axes)
    with ExitStack() as stack:
        stack.enter_context(every_module_called(model))
        stack.callback(seen._close)
        seen._open()
        yield seen


class Watch:
    """What the last forward showed: values by label, and the sites in execution order.

    Filled by `seen.run(x)` or by a plain call of the model; each forward starts afresh. Readable after the
    watch is over.
    """

    def __init__(self, model: nn.Module, sites: Any, sink: Sink | None, axes: bool) -> None:
        self._root = unwrap(model)
        self._names = Names.of(self._root)
        self._wanted = selected(self._names, sites)
        self._keep = Keep() if sink is None else None
        self._sink: Sink = sink or self._keep  # type: ignore[assignment]
        self._handles: list[RemovableHandle] = []
        self._sites: dict[str, Site] | None = None  # what the first whole forward showed, in its order
        self._axes = axes
        self._layout: FeatureAxes | None = None  # while the first forward lasts
        self._never_called: list[str] = []
        self._no_activation: dict[str, str] = {}
        self._thread = threading.get_ident()
        self._depth = 0  # a model may call itself
        self._start()
        self._active = False

    # The forward

    def run(self, *args: Any, **kwargs: Any) -> None:
        """One forward that fills this watch only."""
        if not self._handles:
            raise RuntimeError("this watch is over: call run() inside its with block")
        token = _RUNNING.set(self)
        try:
            self._root(*args, **kwargs)
        except Exception as error:
            if self._failure is not None and error is not self._failure:
                raise self._failure from error
            raise
        finally:
            self._active, self._depth = False, 0
            _RUNNING.reset(token)

    def _open(self) -> None:
        self._handles.append(self._root.register_forward_pre_hook(self._begin, prepend=True))
        for name, wanted in self._wanted.items():
            if is_script(wanted.module):
                if wanted.required:
                    raise SiteError(f"site {name!r} is a TorchScript module, which cannot be watched")
                continue
            self._handles.append(wanted.module.register_forward_hook(self._hook(name, wanted)))
        self._handles.append(self._root.register_forward_hook(self._finish))
        self._handles.append(self._root.register_forward_hook(self._leave, always_call=True))

    def _close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._end_layout()
        self._active = False

    def _start(self) -> None:
        self._active, self._complete = True, False
        self._failure: Exception | None = None  # of a site; raised when the forward is over
        self._calls = dict.fromkeys(self._wanted, 0)
        self._values: dict[str, Any] = {}
        if self._sites is None:
            self._found: dict[str, Site] = {}
            self._no_activation.clear()

    def _elsewhere(self) -> bool:
        """In another thread, which calls the model for itself."""
        return threading.get_ident() != self._thread

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._elsewhere():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._active = False
        if _RUNNING.get() in (None, self):
            self._start()
            if self._keep is not None:
                self._keep.start()
            if self._sites is None and self._axes:
                self._layout = FeatureAxes()
                self._layout.__enter__()

    def _leave(self, *_: Any) -> None:
        if self._elsewhere():
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._end_layout()

    def _end_layout(self) -> None:
        """After the first forward, one that failed too, operations are no longer followed."""
        if self._layout is not None:
            self._layout.__exit__(None, None, None)
            self._layout = None

    def _hook(self, name: str, wanted: SiteRequest) -> Callable[[nn.Module, Any, Any], None]:
        def fire(module: nn.Module, args: Any, output: Any) -> None:
            if not self._active or self._elsewhere() or (module is self._root and self._depth > 1):
                return  # a call from outside the model's own forward, by itself, or another watch's run
            self._calls[name] += 1
            call = self._calls[name]
            if self._failure is None and (wanted.calls is None or call in wanted.calls):
                try:
                    self._record(name, call, output)
                except Exception as error:
                    # A model that keeps something on itself during its forward would be left in the middle of it.
                    self._failure = error

        return fire

    def _record(self, name: str, call: int, output: Any) -> None:
        label = label_of(self._names, name, call)
        if label in self._no_activation:
            return
        required = self._sites is not None or call in self._wanted[name].required
        activation = activation_in(output)
        if isinstance(activation, str):
            if required:
                raise SiteError(f"site {label!r} ({type(self._names.by_name[name]).__name__}) {activation}")
            self._no_activation[label] = activation
            return
        if self._sites is None:
            last = None if self._layout is None else self._layout.channels_last(activation)
            self._found[label] = Site(label, name, call, tuple(activation.shape[1:]), last)
        elif label not in self._sites:
            raise SiteError(
                f"site {label!r} fired now but not in the first forward: the model's path depends on its "
                "input. Name the sites that every input passes"
            )
        site = self._found[label] if self._sites is None else self._sites[label]
        try:
            with without_autocast(activation.device.type):
                self._values[label] = self._sink(site, activation)
        except NoRows as problem:
            if required:
                raise
            del self._found[label]
            self._no_activation[label] = problem.reason

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._active or self._elsewhere() or self._depth > 1:
            return
        self._active = False
        if self._failure is not None:
            raise self._failure
        if self._sites is None:
            self._check_first_forward()
            self._sites = self._found
        missing = [label for label in self._sites if label not in self._values]
        if missing:
            raise SilentSite(f"fired in the first forward but not in this one: {', '.join(missing)}")
        if self._keep is not None:
            self._keep.learn()
        self._complete = True

    def _check_first_forward(self) -> None:
        silent = []
        self._never_called = [label_of(self._names, name, 1) for name, calls in self._calls.items() if not calls]
        for name, wanted in self._wanted.items():
            calls = self._calls[name]
            why = f"{type(wanted.module).__name__}, {f'called {calls} times' if calls else 'never called'}"
            late = [label_of(self._names, name, k) for k in sorted(wanted.required) if k > calls]
            silent += [f"{label!r} ({why})" for label in late]
        if silent:
            raise SilentSite(f"sites that never fired: {', '.join(silent)}; name a module that the forward calls")
        if not self._found:
            reasons = [f"{label!r} {reason}" for label, reason in self.left_out.items()]
            few = ", ".join(reasons[:5]) + (f" and {len(reasons) - 5} more" if len(reasons) > 5 else "")
            raise SilentSite(f"none of the sites gave an activation: {few}; name others")

    # What was seen

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites in execution order, as the first forward had them."""
        if self._sites is None:
            raise RuntimeError("no forward has finished yet: call seen.run(x) or model(x) first")
        return tuple(self._sites.values())

    @property
    def left_out(self) -> dict[str, str]:
        """Sites that a glob, a type or a default named and that gave no activation or no rows, with the reason."""
        scripts = {name for name, wanted in self._wanted.items() if is_script(wanted.module)}
        silent = {n: "is TorchScript" if n in scripts else "was never called" for n in self._never_called}
        return {**silent, **self._no_activation}

    def __getitem__(self, label: str) -> Any:
        known = [site.label for site in self.sites]
        exact = find_name(self._names, label)
        shown = label_of(self._names, exact[0], exact[1] or 1) if exact else label
        if shown not in known:
            raise KeyError(f"no site {label!r}{nearest(label, known)}")
        return self._value(shown)

    def values(self) -> list[Any]:
        """One value per site, in the order of `sites`."""
        return [self._value(site.label) for site in self.sites]

    def items(self) -> list[tuple[str, Any]]:
        return [(site.label, self._value(site.label)) for site in self.sites]

    def _value(self, label: str) -> Any:
        if not self._complete:
            raise RuntimeError("the last forward did not finish, so there is nothing to read: run it again")
        if self._keep is not None:
            self._keep.check(label, self._values[label])
        return self._values[label]

    def __contains__(self, label: object) -> bool:
        return any(site.label == label for site in self.sites)

    def __iter__(self) -> Iterator[str]:
        return iter([site.label for site in self.sites])

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        state = "no forward yet" if self._sites is None else f"{len(self._sites)} sites"
        return f"<Watch of {type(self._root).__name__}: {state}>"


@contextmanager
def every_module_called(model: nn.Module) -> Iterator[None]:
    """The model in this thread alone, without what passes hooks by: compiled code, and attention's fused path."""
    modules = modules_of(model)
    with ExitStack() as stack:
        stack.enter_context(held(modules))
        if any(map(is_compiled, modules)) and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(_EAGER)
        attention = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
        if any(isinstance(module, attention) for module in modules):
            stack.enter_context(attention_in_parts)
        yield


def run_changed(
    model: nn.Module, module: nn.Module, call: int, change: Callable[[Any], Any], arguments: CallArguments
) -> Any:
    """The model's output with `change(output)` in place of what one call of a module returns; None changes nothing.

    Calls of the module are counted from 1.
    """
    calls = 0

    def fire(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        return change(output) if calls == call else None

    with every_module_called(model):
        handle = module.register_forward_hook(fire)
        try:
            output = model(*arguments.args, **arguments.kwargs)
        finally:
            handle.remove()
    if calls < call:
        names = Names.of(model)
        site = label_of(names, names.first[id(module)], call)
        raise SilentSite(f"the forward of this input did not reach {site!r}")
    return output


_EAGER = Shared(lambda: torch.compiler.set_stance("force_eager"))
