"""Named changes to inputs under which models can be compared: none, a corruption, an attack, noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..checks import nearest, whole_number
from ..factory import parse_call
from .attacks import ATTACKS, Attack, open_attack
from .corruptions import CORRUPTIONS, DEFAULT, Corruption, find_corruption

CLEAN = "clean"


@dataclass(frozen=True)
class Shift:
    """A change to inputs before models see them: a corruption, an attack, or none."""

    label: str
    corruption: Corruption | None = None
    severity: int = DEFAULT
    attack: Attack | None = None
    seed: int = 0  # of what is random in it

    @property
    def is_against_a_model(self) -> bool:
        """Whether the changed inputs depend on the model that they are to mislead."""
        return self.attack is not None and self.attack.kind != "gaussian"

    def of_any_model(self, images: Tensor, *, index: Tensor) -> Tensor:
        """The changed images, where they do not depend on a model."""
        if self.corruption is not None:
            return self.corruption(images, severity=self.severity, seed=self.seed, index=index)
        return images if self.attack is None else self.attack(_no_model, images, seed=self.seed, index=index)


def open_shift(text: str, seed: int = 0) -> Shift:
    """The shift that a text names: "clean", "fog", "fog(severity=5)", "pgd(epsilon=0.1)" or "gaussian"."""
    name, options = parse_call(text)
    if name in ATTACKS:
        return Shift(text.strip(), attack=open_attack(text), seed=seed)
    if name == CLEAN and not options:
        return Shift(CLEAN)
    known = [CLEAN, *CORRUPTIONS, *ATTACKS]
    if name not in known:
        raise ValueError(f"no shift is called {name!r}{nearest(name, known)}")
    if wrong := [option for option in options if option != "severity" or name == CLEAN]:
        raise ValueError(f"{text!r}: no option {wrong[0]!r}; a corruption has a severity, 'clean' no options")
    severity = whole_number(options.get("severity", DEFAULT), f"{name}: severity", least=1, most=5)
    return Shift(text.strip(), find_corruption(name), severity, seed=seed)


def open_shifts(shifts: str | Sequence[str] | Sequence[Shift], seed: int = 0) -> tuple[Shift, ...]:
    """The shifts that texts name, in order; "corruptions" and "attacks" stand for all of those.

    `seed`: of what is random in them. Shifts that are open already stay as they are.
    """
    groups = {"corruptions": list(CORRUPTIONS), "attacks": list(ATTACKS)}
    given: Sequence[str | Shift] = [shifts] if isinstance(shifts, str) else shifts
    found: list[Shift] = []
    for each in given:
        found += [each] if isinstance(each, Shift) else [open_shift(name, seed) for name in groups.get(each, [each])]
    labels = [shift.label for shift in found]
    if not found:
        raise ValueError("no shifts given: name 'clean', a corruption or an attack")
    if twice := [label for k, label in enumerate(labels) if label in labels[:k]]:
        raise ValueError(f"the shift {twice[0]!r} is given twice")
    return tuple(found)


def _no_model(images: Tensor) -> Tensor:
    raise AssertionError("noise asks no model")
