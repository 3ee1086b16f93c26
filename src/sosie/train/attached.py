"""A term of the loss that is made of activations: hooks borrowed for as long as a block lasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..capture import Site, SiteError, borrowed
from .taps import Shown, Taps

Term = Callable[..., Tensor]
LOOKS = 50  # due steps between looks at the values on a GPU: each look waits for it
IN_USE = (
    "a penalty is attached to this model in another thread, which trains it: run it there, or after the penalty's with "
    "block"
)


class Attached(AbstractContextManager["Attached"]):
    """`with Attached(model, sites, term) as penalty`: `penalty()` is weight × `term` of the last forward's activations.

    `sites` as everywhere (names, globs, types; see `select`). `term` gets the activation of each site, in execution
    order, and gives a single number; gradients flow. `every`: each call of `penalty()` is a step, and the first of so
    many is due; in the others nothing is kept, and `penalty()` is 0. `rows`: only the first so many inputs of a batch;
    None: all. What the model overwrites later (a ReLU in place) is seen as it was. Under torch.compile attach before
    the model is first called. After the block the model is as it was, also when an error ended it; inside it another
    thread that would compare the model is refused.
    """

    def __init__(
        self, model: nn.Module, sites: Any, term: Term, *, rows: int | None = None, every: int = 1, weight: float = 1.0
    ) -> None:
        self._take_on([model], rows, every, weight)
        self._term = term
        self._taps.append(Taps(model, sites, rows=rows))

    def _take_on(self, models: Sequence[nn.Module], rows: int | None, every: int, weight: float) -> None:
        """What every kind of penalty checks and keeps; it makes its taps itself."""
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ValueError(f"rows={rows!r}: how many inputs of a batch to take, or None for all")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: 1 for every step, 5 for the first of every five")
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
        self._bad: Tensor | None = None  # (LOOKS,) of the last due steps: NaN where the value was no number, else 0

    @property
    def due(self) -> bool:
        """Whether the next call of `penalty()` gives more than 0."""
        return self.is_due(self.step)

    def is_due(self, step: int) -> bool:
        return self._attached and self.weight > 0 and step % self.every == 0

    @property
    def recordable(self) -> bool:
        """Whether a due step can be recorded into a CUDA graph: `term` must not wait for the device."""
        return True

    def go_to(self, step: int) -> None:
        """Let this be the number of calls so far."""
        self.step = step
        for taps in self._taps:
            taps.forget()
            taps.due = self.due

    def begin_again(self) -> None:
        """As before the first call."""
        if self._bad is not None:
            self._bad.zero_()  # not a new one: recorded steps write to this
        self.go_to(0)

    def settings(self) -> dict[str, Any]:
        """What was asked for, as far as a checkpoint can compare it."""
        sites = [taps.asked for taps in self._taps]
        return {"weight": self.weight, "rows": self.rows, "every": self.every, "sites": sites}

    def state_dict(self) -> dict[str, int]:
        """The steps so far, on which hangs what is due: the rest is made anew."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many steps, attached already or not."""
        step = state["step"]
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r}: the calls of penalty() so far, a whole number from 0 on")
        self.go_to(step)

    def __enter__(self) -> Self:
        if self._attached:
            raise RuntimeError("this penalty is attached already")
        self._hold = borrowed([taps.model for taps in self._taps], refusal=IN_USE)
        self._hold.__enter__()
        self._attached, self._bad = True, None
        self._first = _first_parameter(self._models)
        for taps in self._taps:
            taps.open()
            taps.due = self.due
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            found = self._nothing()
        else:
            shown = [taps.take() for taps in self._taps]
            self._check_gradients(shown)
            found = self.weight * self._value(shown)
            self._note(found, shown)
        self.go_to(self.step + 1)
        return found

    def _value(self, shown: Sequence[Sequence[Shown]]) -> Tensor:
        found = self._term(*map(_outputs, shown))
        if not isinstance(found, Tensor) or found.dim():
            got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"the term of a penalty is a single number, a tensor of no dimensions; got {got}")
        return found

    def _check_gradients(self, shown: Sequence[Sequence[Shown]]) -> None:
        """Refuse what would be a constant: it looks like a penalty, and nothing learns from it."""
        sites = [each for model in shown for each in model]
        if sites and torch.is_grad_enabled() and not any(_is_trained(each.value) for each in sites):
            named = ", ".join(repr(each.label) for each in sites[:5])
            raise SiteError(
                f"no gradient flows from {named}: all parameters before them are frozen (requires_grad), so that the "
                "penalty changes nothing; name later sites, or measure under torch.no_grad()"
            )

    def _nothing(self) -> Tensor:
        return torch.zeros((), device=None if self._first is None else self._first.device)

    # Values that are no numbers

    def _note(self, found: Tensor, shown: Sequence[Sequence[Shown]]) -> None:
        """Find the first value that is no number; a GPU is not waited for at every step."""
        due = self.step // self.every
        if self._bad is None:
            with torch.inference_mode(False):  # it may be written to outside of it
                self._bad = torch.zeros(LOOKS, dtype=found.dtype, device=found.device)
        # One operation, in place as recorded steps are: 0 × what is no number is NaN, and stays so.
        self._bad[due % LOOKS].add_(found.detach(), alpha=0)
        if not found.is_cuda or (due + 1) % LOOKS == 0:
            self._look(due, shown)

    def _look(self, due: int, shown: Sequence[Sequence[Shown]] = ()) -> None:
        """At the values up to this due step, since the last look."""
        wrong = [] if self._bad is None else self._bad.isnan().nonzero().tolist()
        if not wrong:
            return
        assert self._bad is not None
        self._bad.zero_()  # told once
        step = (due // LOOKS * LOOKS + wrong[0][0]) * self.every + 1
        sites = [each.label for model in shown for each in model if not _is_finite(each.value)]
        where = f"; not finite at {', '.join(map(repr, sites[:5]))}" if sites else self._where()
        raise ValueError(
            f"the penalty of step {step} is NaN or infinite{where}: take a smaller weight than {self.weight:g}, "
            "a lower rate, or look for such values in the inputs"
        )

    def _where(self) -> str:
        """What else there is to say of a value that is no number while the sites of the model are finite."""
        return ""


def _first_parameter(models: Sequence[nn.Module]) -> Tensor | None:
    """The first that is learnt with, which a table of whole numbers is not."""
    every = [each for model in models for each in model.parameters()]
    return next((each for each in every if each.is_floating_point()), every[0] if every else None)


def _outputs(shown: Sequence[Shown]) -> Mapping[Site, Tensor]:
    return {each.site: each.value for each in shown if not each.is_input}


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(part).all()) for part in _tensors(value))


def _is_trained(value: Any) -> bool:
    return any(part.requires_grad for part in _tensors(value))


def _tensors(value: Any) -> tuple[Tensor, ...]:
    """A tensor, or whatever tensors a sink made."""
    return value if isinstance(value, tuple) else (value,)
