"""Arguments checked once, at the door: what was wrong, and what would be right."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


def whole_number(value: Any, name: str, *, least: int | None = None, most: int | None = None, why: str = "") -> int:
    """The value if it is a whole number within these bounds; `why` says what the bound is for."""
    right = not isinstance(value, bool) and (isinstance(value, int) or _is_integral(value))
    if not right or (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(_sentence(name, "a whole number", least, most, value, why))
    return int(value)


def positive(value: Any, name: str, *, most: float | None = None, why: str = "") -> float:
    """The value if it is a finite number above 0, and at most `most`."""
    right = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    if not right or (most is not None and value > most):
        raise ValueError(_sentence(name, "a number above 0", None, most, value, why))
    return float(value)


def one_of(value: Any, name: str, choices: Iterable[str]) -> str:
    """The value if it is one of the choices; otherwise the error names them, and the nearest."""
    known = list(choices)
    if value in known:
        return str(value)
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}")


def _is_integral(value: Any) -> bool:
    """NumPy's whole numbers."""
    return hasattr(value, "__index__") and hasattr(value, "dtype")


def _sentence(name: str, kind: str, least: float | None, most: float | None, value: Any, why: str) -> str:
    within = {
        (False, False): "",
        (True, False): f" of at least {least}",
        (False, True): f" of at most {most}",
        (True, True): f" from {least} to {most}",
    }[least is not None, most is not None]
    return f"{name} must be {kind}{within}, got {value!r}" + (f": {why}" if why else "")
