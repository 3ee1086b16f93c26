"""Checks of arguments, made once at the door: the error says what is wrong, and what would be right."""

from __future__ import annotations

import ast
import difflib
import math
import os
import re
import threading
import warnings
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any

_PARSING = threading.Lock()  # with Python 3.11, two threads that parse at a time may get a SystemError
if hasattr(os, "register_at_fork"):  # as `process_state.forkable`, which would import torch
    os.register_at_fork(before=_PARSING.acquire, after_in_parent=_PARSING.release, after_in_child=_PARSING.release)


def whole_number(value: Any, name: str, *, least: int | None = None, most: int | None = None, why: str = "") -> int:
    """Return the value if it is a whole number within these bounds; `why` gives the reason for a bound."""
    right = isinstance(value, Integral) and not isinstance(value, bool)
    if not right or (least is not None and value < least) or (most is not None and value > most):
        within = {
            (False, False): "",
            (True, False): f" of at least {least}",
            (False, True): f" of at most {most}",
            (True, True): f" from {least} to {most}",
        }[least is not None, most is not None]
        raise ValueError(f"{name} must be a whole number{within}, got {value!r}" + (f": {why}" if why else ""))
    return int(value)


def positive(value: Any, name: str, *, most: float | None = None, why: str = "") -> float:
    """Return the value if it is a finite number above 0, and at most `most`."""
    right = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) > 0
    if not right or (most is not None and value > most):
        within = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name} must be a number above 0{within}, got {value!r}" + (f": {why}" if why else ""))
    return float(value)


def one_of(value: Any, name: str, choices: Iterable[str]) -> str:
    """Return the value if it is one of the choices; the error names them, and the nearest."""
    known = list(choices)
    if value in known:
        return str(value)
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}")


def renamed(old: Any, new: Any, old_name: str, new_name: str) -> Any:
    """Return the value of an argument that had another name, which is accepted, with a warning, for one version."""
    if old is None:
        return new
    if new is not None:
        raise TypeError(f"{old_name}= is called {new_name}= now: give it once")
    warnings.warn(
        f"{old_name}= is called {new_name}= now; the next version knows only that", FutureWarning, stacklevel=3
    )
    return old


def paired_rows(*counts: int) -> int:
    """Return the number of rows if all counts are equal."""
    if len(set(counts)) != 1:
        raise ValueError(f"need paired rows, got {' and '.join(map(str, dict.fromkeys(counts)))}")
    return counts[0]


def nearest(text: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known names closest to it, or else the first few."""
    known = [name for name in known if name]
    inside = [name for name in known if name.endswith(f".{text}")][:3]
    near = inside or difflib.get_close_matches(text, known, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; there are {listed(known, 8)}" if known else "; there are none"


def matching(known: Iterable[str], wanted: str, what: str) -> list[str]:
    """The known names that a name or glob selects, in their order; an exact name wins over a glob.

    `what` begins the error if there are none: "no layer is called".
    """
    known = list(known)
    selected = [wanted] if wanted in known else [name for name in known if fnmatchcase(name, wanted)]
    if not selected:
        raise ValueError(f"{what} {wanted!r}{nearest(wanted, known)}")
    return selected


def natural(name: str) -> list[Any]:
    """A key that sorts layer2 before layer10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def listed(items: Iterable[object], most: int = 5, separator: str = ", ") -> str:
    """The first few items of a list for a message, and the number of others."""
    texts = list(map(str, items))
    more = f"{separator.rstrip(', ')} and {len(texts) - most:,} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def check_options(options: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raise for an option that `what` does not have, and for a flag that is neither True nor False.

    `known`: the names of its options, or {name: default}.
    """
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{what} has no option {name!r}; it has {', '.join(known) or 'none'}")
        if isinstance(known, Mapping) and isinstance(known[name], bool) and not isinstance(value, bool):
            raise ValueError(f"{name} of {what} is True or False, got {value!r}")


def call_text(name: str, options: Mapping[str, Any]) -> str:
    """The text that `parse_call` reads."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of `name` or `name(width=2, kind='B')`; options are Python literals, never evaluated."""
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name.strip(), {}
    advice = f"{text!r}: write options as name(width=2, kind='B'), each a number, a text in quotes, True, None or list"
    try:
        with _PARSING:
            call = ast.parse(f"f({rest}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(advice) from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(advice)
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError(advice)
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError) as error:
            raise ValueError(f"option {keyword.arg!r} of {advice}") from error
    return name.strip(), options
