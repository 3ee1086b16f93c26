"""Hooks for training: the activations of a forward, with their gradients, kept only when a step is due."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..capture import SilentSite, Site, SiteError, borrowed, select, unwrap
from ..capture.batches import rebuild
from ..capture.layout import layout_by_class
from ..capture.sites import Names, first_tensor, label_of, tensors_in
from ..checks import whole_number


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


Key = tuple[int, bool]  # which site, and whether it is its input
AGAIN = "run the step again (it will be copied)"


class Overwritten:
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

    def may_be(self, key: Key, training: bool) -> bool:
        """Whether to copy: it was overwritten before, or this is the first forward."""
        return training not in self._known or key in self._known[training]

    def look_at(self, key: Key, activation: Tensor) -> None:
        self._live.append((key, activation, activation._version))

    def check(self, training: bool) -> None:
        """After a forward: learn what it overwrote, and raise if that was read without a copy."""
        changed = {key for key, live, version in self._live if live._version != version}
        known = self._known.get(training)
        new = set() if known is None else changed - known
        self._known.setdefault(training, set()).update(changed)  # not anew: graphs add to it
        self._live.clear()
        if new:
            raise SiteError(
                f"{self._named(min(new))} was changed in place, which it was not in the first forward; {AGAIN}"
            )

    @contextmanager
    def noticed(self, key: Key, training: bool) -> Iterator[None]:
        """Let the backward raise if a tensor that is saved inside has been changed in place.

        Torch checks versions of saved tensors only where there are no hooks; hooks of our own keep those of
        checkpointing out, whose second forward does not reach the taps. The graph holds these hooks and must not hold
        the taps, which hold the graph.
        """
        unpack = partial(_unchanged, self._named(key), key, self._known.get(training, set()))
        with torch.autograd.graph.saved_tensors_hooks(_with_version, unpack):
            yield

    def _named(self, key: Key) -> str:
        k, is_input = key
        return f"the {'input' if is_input else 'output'} of site {self._labels[k]!r}"


def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unchanged(name: str, key: Key, overwritten: set[Key], saved: Any) -> Tensor:
    tensor: Tensor
    tensor, version = saved
    if tensor._version != version:
        overwritten.add(key)
        raise SiteError(
            f"{name} was changed in place after penalty() had read it, so that its gradient is lost; {AGAIN}"
        )
    return tensor


Sink = Callable[[Tensor], Any]
COMPILED = (
    " (code that was compiled before the penalty was attached skips its hooks: attach first, or call "
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
    """The output of one site, or its input."""

    site: Site
    is_input: bool
    value: Any  # the activation of the first `rows` inputs, or what the sink made of it
    label: str  # its name among those of other models


class Taps:
    """Borrowed hooks on one model. They do nothing in a forward unless `due` is set before it.

    Unlike `watch`, this leaves compiled code on: the hooks are traced with the model, and depend on plain attributes
    that compiled code reads. `rows`: only the first so many inputs are kept, as copies; None: the whole activation,
    without a copy where nothing overwrites it (learnt from the first forward, which copies) and passed through `sink`
    inside the hook, so that its gradient is computed when the backward reaches that site, not for all sites at once.
    `inputs`: keep the inputs of each site too. `calls`: keep the arguments the model was called with.
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
        self._entered: dict[str, Site] = {}  # inputs of sites, by their labels
        self._starts: set[str] = set()  # the sites whose inputs are kept once stages are known
        self._overwritten = Overwritten([label_of(self._names, name, 1) for name in self._wanted])
        self._autocast = "cpu", torch.bfloat16, False
        self.due = False
        self.forget()

    @property
    def asked(self) -> list[str]:
        """The sites by name, with the calls where only some were named."""
        return [name if each.calls is None else f"{name}@{sorted(each.calls)}" for name, each in self._wanted.items()]

    # The forward

    def open(self) -> None:
        begin = self.root.register_forward_pre_hook(Hook(self._begins), prepend=True, with_kwargs=True)
        self._handles.append(begin)
        for k, wanted in enumerate(self._wanted.values()):
            if self._reads_input[k]:
                enter = Hook(partial(self._enters, k))
                self._handles.append(wanted.module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(wanted.module.register_forward_hook(Hook(partial(self._fires, k))))
        self._handles.append(self.root.register_forward_hook(Hook(self._finishes)))

    def close(self) -> None:
        self.due = False  # compiled code keeps the hooks it was traced with: this makes them do nothing
        while self._handles:
            self._handles.pop().remove()
        self.forget()

    def forget(self) -> None:
        """Drop the activations of the last forward, and its graph."""
        self._active, self.complete = False, False
        self._fired: list[_Fired] = []
        self._overwritten.forget()
        self._last: tuple[Tensor, int, Any] | None = None
        self.called: tuple[Any, Any] | None = None
        self.count = 0

    def _begins(self, args: Any, kwargs: Any) -> None:
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

    def _enters(self, site: int, args: Any, kwargs: Any) -> None:
        if self._active and self._reads_input[site]:
            self._note(site, True, args[0] if args and isinstance(args[0], Tensor) else (args, kwargs))

    def _fires(self, site: int, args: Any, output: Any) -> None:
        if self._active:
            self._note(site, False, output)

    def _finishes(self, args: Any, output: Any) -> None:
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
            return found  # no rows: `take` raises where the site was named
        if torch.compiler.is_compiling():
            # Compiled code knows what is overwritten when, so a sink may have the tensor itself.
            if self._rows is None and self._sink is not None and len(found):
                return self._sink(found)
            return found[: self._rows].clone()
        version = -1 if found.is_inference() else found._version
        if self._last is not None and self._last[0] is found and self._last[1] == version >= 0:
            return self._last[2]  # the output of the layer before is the input of this one
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

    def take(self) -> list[Shown]:
        """What the last forward showed, in execution order; the copies are the caller's from here on."""
        if not self.complete and self._fired:
            raise RuntimeError("the last forward did not finish, so there is nothing to read: run it again")
        if not self.complete:
            raise RuntimeError(f"no forward has finished since the last step: call the model first{COMPILED}")
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
        """From now on keep the inputs of these sites only; raise if the inputs of `lacking` were not kept."""
        passed_by = lacking & self._entered.keys()  # others have no input that could be kept
        self._starts |= labels | passed_by
        sites = (self._sites or {}).values()
        for k, name in enumerate(self._wanted):
            labels_of = {label_of(self._names, name, site.call) for site in sites if site.module_name == name}
            self._reads_input[k] = not labels_of.isdisjoint(self._starts)
        if passed_by:
            raise SiteError(
                f"with inputs of this size a stage begins at site {min(passed_by)!r}, as none did before, and its "
                "input was not kept; run the step again (it will be)"
            )

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
            site = self._site(label, name, call, fired)
            yield Shown(site, fired.is_input, fired.kept, f"input of {label}" if fired.is_input else label)

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


Term = Callable[..., Tensor]
LOOKS = 50  # due steps between looks at the values on a GPU: each look waits for it
IN_USE = (
    "a penalty is attached to this model in another thread, which trains it: run it there, or after the penalty's with "
    "block"
)


class Attached(AbstractContextManager["Attached"]):
    """`with Attached(model, sites, term) as penalty`: `penalty()` is weight × `term` of the last forward's activations.

    `sites`: names, globs or types (see `select`). `term` is called with {site: activation}, in execution order, and
    returns a single number; gradients flow. `every`: each call of `penalty()` is a step, and the first of every so many
    is due; in the others nothing is kept, and `penalty()` is 0. `rows`: only the first so many inputs of a batch; None:
    all. An activation that the model overwrites later (a ReLU in place) is seen as it was before. Under torch.compile
    attach before the model is first called. After the block the model is as it was, also after an error; inside it
    another thread that wants to compare the model gets an error.
    """

    def __init__(
        self, model: nn.Module, sites: Any, term: Term, *, rows: int | None = None, every: int = 1, weight: float = 1.0
    ) -> None:
        self._take_on([model], rows, every, weight)
        self._term = term
        self._taps.append(Taps(model, sites, rows=rows))

    def _take_on(self, models: Sequence[nn.Module], rows: int | None, every: int, weight: float) -> None:
        """Check and keep what every kind of penalty has; each makes its taps itself."""
        if rows is not None:
            whole_number(rows, "rows", least=1, why="how many inputs of a batch to take, or None for all")
        whole_number(every, "every", least=1, why="1 for every step, 5 for the first of every five")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"weight={weight!r}: a number from 0 on; which way it pushes is stated by the penalty, not by a sign"
            )
        self.rows, self.every, self.weight = rows, every, weight
        self.step = 0  # calls of penalty() so far
        self._models = models
        self._taps: list[Taps] = []
        self._attached = False
        self._first: Tensor | None = None  # of the parameters, while attached: it takes a while to find at every step
        self._bad: Tensor | None = None  # (LOOKS,) of the last due steps: NaN where the value was not finite, else 0

    @property
    def due(self) -> bool:
        """Whether the next call of `penalty()` computes the term."""
        return self.is_due(self.step)

    def is_due(self, step: int) -> bool:
        return self._attached and self.weight > 0 and step % self.every == 0

    @property
    def recordable(self) -> bool:
        """Whether a due step can be recorded into a CUDA graph: `term` must not wait for the device."""
        return True

    def go_to(self, step: int) -> None:
        """Set the number of calls so far."""
        self.step = step
        for taps in self._taps:
            taps.forget()
            taps.due = self.due

    def begin_again(self) -> None:
        """Go back to before the first call."""
        if self._bad is not None:
            self._bad.zero_()  # not a new one: recorded steps write to this
        self.go_to(0)

    def settings(self) -> dict[str, Any]:
        """The options, which a checkpoint compares."""
        sites = [taps.asked for taps in self._taps]
        return {"weight": self.weight, "rows": self.rows, "every": self.every, "sites": sites}

    def state_dict(self) -> dict[str, int]:
        """The steps so far, which decide when the next one is due."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after so many steps, attached already or not."""
        self.go_to(whole_number(state["step"], "step", least=0, why="the calls of penalty() so far"))

    def __enter__(self) -> Self:
        if self._attached:
            raise RuntimeError("this penalty is attached already")
        self._hold = borrowed([taps.model for taps in self._taps], refusal=IN_USE)
        self._hold.__enter__()
        self._attached, self._bad = True, None
        every = [each for model in self._models for each in model.parameters()]
        # One that is learnt with, which a table of whole numbers is not.
        self._first = next((each for each in every if each.is_floating_point()), every[0] if every else None)
        for taps in self._taps:
            taps.open()
            taps.due = self.due
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._attached, self._first = False, None
        for taps in self._taps:
            taps.close()
        self._hold.__exit__(None, None, None)
        del self._hold  # which could not be copied
        if kind is None:
            self._look((self.step - 1) // self.every)

    def __call__(self) -> Tensor:
        if not self._attached:
            raise RuntimeError("this penalty is not attached to the model: use it inside its with block")
        if not self.due:
            found = torch.zeros((), device=None if self._first is None else self._first.device)
        else:
            shown = [taps.take() for taps in self._taps]
            self._check_gradients(shown)
            found = self.weight * self._value(shown)
            self._note(found, shown)
        self.go_to(self.step + 1)
        return found

    def _value(self, shown: Sequence[Sequence[Shown]]) -> Tensor:
        found = self._term(*({each.site: each.value for each in model if not each.is_input} for model in shown))
        if not isinstance(found, Tensor) or found.dim():
            got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"the term of a penalty is a single number, a tensor of no dimensions; got {got}")
        return found

    def _check_gradients(self, shown: Sequence[Sequence[Shown]]) -> None:
        """Raise where the penalty would be a constant, from which nothing learns."""
        sites = [each for model in shown for each in model]
        flows = any(part.requires_grad for each in sites for part in _tensors(each.value))
        if sites and torch.is_grad_enabled() and not flows:
            named = ", ".join(repr(each.label) for each in sites[:5])
            raise SiteError(
                f"no gradient flows from {named}: all parameters before them are frozen (requires_grad), so that the "
                "penalty changes nothing; name later sites, or measure under torch.no_grad()"
            )

    # Values that are NaN or infinite

    def _note(self, found: Tensor, shown: Sequence[Sequence[Shown]]) -> None:
        """Note whether the value is NaN or infinite, without waiting for a GPU at every step."""
        due = self.step // self.every
        if self._bad is None:
            with torch.inference_mode(False):  # it may be written to outside of it
                self._bad = torch.zeros(LOOKS, dtype=found.dtype, device=found.device)
        # One operation, in place as recorded steps are: 0 × NaN and 0 × ∞ are NaN, and stay so.
        self._bad[due % LOOKS].add_(found.detach(), alpha=0)
        if not found.is_cuda or (due + 1) % LOOKS == 0:
            self._look(due, shown)

    def _look(self, due: int, shown: Sequence[Sequence[Shown]] = ()) -> None:
        """Raise if a value since the last look, up to this due step, was NaN or infinite."""
        wrong = [] if self._bad is None else self._bad.isnan().nonzero().tolist()
        if not wrong:
            return
        assert self._bad is not None
        self._bad.zero_()  # said once
        step = (due // LOOKS * LOOKS + wrong[0][0]) * self.every + 1
        sites = [
            each.label
            for model in shown
            for each in model
            if not all(bool(part.isfinite().all()) for part in _tensors(each.value))
        ]
        where = f"; not finite at {', '.join(map(repr, sites[:5]))}" if sites else self._where()
        raise ValueError(
            f"the penalty of step {step} is NaN or infinite{where}: take a smaller weight than {self.weight:g}, "
            "a lower rate, or look for such values in the inputs"
        )

    def _where(self) -> str:
        """More about such a value where the activations of the model are finite."""
        return ""


def _tensors(value: Any) -> tuple[Tensor, ...]:
    """A tensor, or whatever tensors a sink made."""
    return value if isinstance(value, tuple) else (value,)
