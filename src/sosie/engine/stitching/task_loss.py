"""The options of task-loss matching, written as "task_loss(start='random', epochs=10)"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...factory import parse_call
from ...linalg import Fit, find_fit

NAME = "task_loss"
TARGETS = ("soft", "labels")
RANDOM = "random"


@dataclass(frozen=True)
class TaskLoss:
    """Train the layer so that the stitched network does B's job (Csiszárik et al. 2021, section 4.2).

    `targets`: "soft", the cross-entropy to B's own soft answers, or "labels", to the data's. `start`: "random" (as
    torch.nn.Linear starts) or any closed form's text. `rank`: the layer is a product of two factors that meet in so
    few channels. The loss is that + `l1` Σ |weight| + `cka` × linear CKA between S(A) and B on the rows of the batch
    (biased upwards where these are few). `threshold`: weights that end up smaller are set to zero. Adam, at a `rate`
    that is divided by ten at each third of the epochs. `patience`: stop after so many epochs without a better
    validation loss. `seed`: of a random start, the order of the inputs, and which tenth is held out. `autocast`: the
    networks run in bfloat16. `record`: similarity indices every so many epochs, and at the end; 0: never (at 256
    channels they cost a good part of a second each time).
    """

    targets: str = "soft"
    start: str = "least_squares"
    rank: int | None = None
    l1: float = 0.0
    threshold: float = 0.0
    cka: float = 0.0
    bias: bool = True
    epochs: int = 30
    rate: float = 1e-3
    batch: int = 128
    patience: int | None = None
    seed: int = 0
    autocast: bool = False
    record: int = 1

    def __post_init__(self) -> None:
        if self.targets not in TARGETS:
            raise _bad("targets", self.targets, "'soft' or 'labels'")
        for name in ("bias", "autocast"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        for name, least in (("epochs", 1), ("batch", 1), ("seed", 0), ("record", 0), ("rank", 1), ("patience", 1)):
            optional = name in ("rank", "patience")
            if not (optional and getattr(self, name) is None):
                _check_whole(name, getattr(self, name), least, " or None" if optional else "")
        if not _is_number(self.rate) or not self.rate > 0:
            raise _bad("rate", self.rate, "a finite number above 0")
        for name in ("l1", "threshold"):
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise _bad(name, getattr(self, name), "a finite number, 0 or more")
        if not _is_number(self.cka):
            raise _bad("cka", self.cka, "a finite number; a negative one pulls towards B")
        if self.rank is not None and (self.l1 or self.threshold):
            raise ValueError(f"{NAME}: rank={self.rank} with l1 or threshold: weights set to zero would undo the rank")
        self.start_fit  # noqa: B018 (an unknown start is refused here, not after the pass over the data)

    @property
    def start_fit(self) -> Fit | None:
        """The closed form to start from; None: at random."""
        if not isinstance(self.start, str):
            raise _bad("start", self.start, f"'{RANDOM}' or the text of a closed form")
        return None if self.start == RANDOM else find_fit(self.start, also=(RANDOM,))

    @property
    def name(self) -> str:
        """As it is written, with the options that are not the usual ones."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{NAME}({', '.join(f'{key}={value!r}' for key, value in changed)})" if changed else NAME


def find_way(text: str | Fit | TaskLoss) -> Fit | TaskLoss:
    """A closed form, or training, by name and options."""
    if not isinstance(text, str):
        if not isinstance(text, (Fit, TaskLoss)):
            raise TypeError(f"a fit is named by a text like 'least_squares' or 'task_loss(seed=1)', got {text!r}")
        return text
    name, options = parse_call(text)
    if name != NAME:
        return find_fit(text, also=(NAME,))
    known = [f.name for f in fields(TaskLoss)]
    if unknown := [key for key in options if key not in known]:
        raise ValueError(f"{NAME} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return TaskLoss(**options)


def find_ways(fit: Any) -> list[Fit | TaskLoss]:
    """All that were asked for, in order."""
    if isinstance(fit, (str, Fit, TaskLoss)):
        return [find_way(fit)]
    if not isinstance(fit, Sequence) or not fit:
        raise ValueError(f"fit is a text or a list of at least one, got {fit!r}")
    return [find_way(each) for each in fit]


def _bad(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{NAME}: {name} must be {allowed}, got {value!r}")


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def _check_whole(name: str, value: object, least: int, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise _bad(name, value, f"a whole number from {least} on{otherwise}")
