"""Fits by name, with options: "least_squares", "reduced_rank(k=8)"."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...factory import parse_call
from .joint import Affine, JointMoments

FITS: dict[str, Fit] = {}


@dataclass(frozen=True)
class Fit:
    """A way of finding an affine map from moments, with the options it was given."""

    name: str  # with the options: "reduced_rank(k=8)"
    function: Callable[..., Affine]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, moments: JointMoments) -> Affine:
        return self.function(moments, **self.options)

    @property
    def summary(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "").split("\n", 1)[0]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What may follow the moments."""
        return dict(list(inspect.signature(self.function).parameters.items())[1:])

    def using(self, **options: Any) -> Fit:
        """The same fit with other options; its name says so."""
        for key, value in options.items():
            if key not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                raise ValueError(f"{self.function.__name__} has no option {key!r}; it has {known}")
            if isinstance(self.parameters[key].default, bool) and not isinstance(value, bool):
                raise ValueError(f"{key} of {self.function.__name__} is True or False, got {value!r}")
        changed = {**self.options, **options}
        text = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        return replace(self, name=f"{self.function.__name__}({text})", options=changed)


def define(function: Callable[..., Affine]) -> Callable[..., Affine]:
    """Register a function of moments as a fit under its own name."""
    name = function.__name__
    if name in FITS:
        raise ValueError(f"a fit named {name!r} is already defined")
    FITS[name] = Fit(name, function)
    return function


def find_fit(text: str | Fit, *, also: Sequence[str] = ()) -> Fit:
    """The fit of that name; options may follow as Python literals: "ridge(strength=0.1)".

    `also`: names that the caller knows besides, for the message about an unknown one.
    """
    if isinstance(text, Fit):
        return text
    name, options = parse_call(text)
    if name not in FITS:
        known = [*FITS, *also]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(f"no fit is called {name!r}{hint} There are {', '.join(known)}")
    found = FITS[name].using(**options) if options else FITS[name]
    for key, parameter in found.parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in found.options:
            raise ValueError(f"{name} needs a value for {key}: write {name}({key}=…)")
    return found


def fit(text: str | Fit, moments: JointMoments) -> Affine:
    """The affine map from A to B that the named fit finds."""
    return find_fit(text)(moments)


def check_number(name: str, value: object, *, above: float = 0.0) -> float:
    """A finite number above a bound, or a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
        raise ValueError(f"{name} must be a number above {above:g}, got {value!r}")
    return float(value)


def check_count(name: str, value: object, most: int) -> int:
    """A whole number from 1 to `most`, or a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most}, got {value!r}")
    return value
