"""Measures, models, data and fits of other installed packages, which name them by entry points of `sosie.measures` …

Nothing is imported before its name is asked for, or all are listed. A plugin that cannot be loaded is an error if its
name is asked for, and left out of a list, with a warning that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Group = Literal["measures", "models", "data", "fits"]


class BrokenPlugin(ValueError):
    """What a package offers under a name cannot be loaded; the message names the package and says why."""


def names(group: Group) -> list[str]:
    """The names that other packages offer; none of them is imported."""
    return sorted({entry.name for entry in _entries(group)})


def load(group: Group, name: str, enter: Callable[[Any], T]) -> T | None:
    """`enter` of what a package offers under that name; None without one, `BrokenPlugin` if it cannot be loaded."""
    for entry in _entries(group):
        if entry.name == name:
            try:
                return enter(entry.load())
            except Exception as error:
                package = entry.dist.name if entry.dist is not None else entry.value
                reason = f"{type(error).__name__}: {error}"
                raise BrokenPlugin(f"{name!r} of the package {package} cannot be loaded: {reason}") from error
    return None


def function(loaded: Any) -> Callable[..., Any]:
    """What was loaded, if it can be called."""
    if not callable(loaded):
        raise TypeError(f"it is no function but {type(loaded).__name__}")
    return loaded


def _entries(group: Group) -> list[EntryPoint]:
    return list(entry_points(group=f"sosie.{group}"))
