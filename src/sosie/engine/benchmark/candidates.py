"""What is put to the test: one of sosie's measures, a function in a file, or any callable."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from ...factory import is_factory, load_function
from ...measures import MEASURES, Measure, find
from ...results import Closer
from ...stats import Atoms, PairedRows
from .scales import SLOW, Scale

Of = Literal["activations", "models"]


@dataclass(frozen=True)
class Candidate:
    """A measure under test: what it compares, which way is closer, how many images it gets."""

    name: str
    of: Of
    closer: Closer | None  # None: to be found out
    run: Measure | Callable[[Any, Any], Any]
    made_of: str  # tells versions of a user's function apart
    rows: int | None = None  # images at most
    notes: tuple[str, ...] = ()

    @property
    def own(self) -> bool:
        """Whether it is one of sosie's."""
        return isinstance(self.run, Measure)

    def value(self, x: Any, y: Any) -> float:
        """Of a user's function: one number for two (n, p) arrays, or for two networks."""
        assert not isinstance(self.run, Measure)
        if isinstance(x, Tensor) and _takes(self.run) == "numpy":
            x, y = (side.cpu().numpy() for side in (x, y))
        found = np.asarray(_plain(self.run(x, y)), dtype=np.float64)
        if found.size != 1:
            raise ValueError(f"{self.name} gave an array of shape {found.shape}, not one number")
        value = float(found.reshape(()))
        if not np.isfinite(value):
            raise ValueError(f"{self.name} gave {value}")
        return value


def open_candidates(
    measures: Sequence[Any] | Any | None,
    scale: Scale,
    *,
    of: Of | None = None,
    closer: Closer | None = None,
    rows: int | None = None,
) -> list[Candidate]:
    """All of sosie's measures of activations and of weights for None; else those named or given."""
    if measures is None:
        given: list[Any] = [m for m in MEASURES.values() if not m.reads_outputs and m.reads is not Atoms]
    else:
        given = list(measures) if isinstance(measures, (list, tuple)) else [measures]
    found = [_open(one, scale, of, closer, rows) for one in given]
    names = [candidate.name for candidate in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} given twice: two measures of one name cannot be told apart")
    if not found:
        raise ValueError("no measures to test")
    return found


def _open(given: Any, scale: Scale, of: Of | None, closer: Closer | None, rows: int | None) -> Candidate:
    if isinstance(given, str) and is_factory(given):
        candidate = _of_function(load_function(given), given.rpartition(":")[2], _file_digest(given))
    elif isinstance(given, (str, Measure)):
        return _of_measure(find(given), scale, rows)
    elif callable(given):
        candidate = _of_function(given, getattr(given, "__name__", type(given).__name__), _source_digest(given))
    else:
        raise TypeError(f"a measure is a name, file.py:function or a callable f(x, y), not {given!r}")
    chosen = of or candidate.of
    if chosen not in ("activations", "models"):
        raise ValueError(f"a measure is of 'activations' or of 'models', not of {chosen!r}")
    way = closer or candidate.closer
    if way not in ("up", "down", None):
        raise ValueError(f"closer is 'up' (larger is more alike) or 'down', not {way!r}")
    return replace(candidate, of=chosen, closer=way, rows=rows or scale.test)


def _of_measure(measure: Measure, scale: Scale, rows: int | None) -> Candidate:
    if measure.reads_outputs:
        raise ValueError(f"{measure.name} compares what models answer, which is what measures are held against here")
    if measure.reads is Atoms:
        raise ValueError(f"{measure.name} compares convolutions that share coefficients; networks here have none")
    of: Of = "models" if measure.reads_weights else "activations"
    most, why = scale.test, ""
    if issubclass(measure.reads, PairedRows):
        most, why = min(most, scale.paired_rows), "its cost grows with the square of their number"
    if measure.base in SLOW and SLOW[measure.base][0] < most:
        most, why = SLOW[measure.base]
    if rows is not None:
        most, why = min(rows, scale.test), "as asked for"
    limited = of == "activations" and most < scale.test
    notes = (f"sees at most {most} of {scale.test} images: {why}",) if limited else ()
    return Candidate(measure.name, of, measure.closer, measure, "sosie", most, notes)


def _of_function(function: Callable[..., Any], name: str, digest: str) -> Candidate:
    told = function.func if isinstance(function, functools.partial) else function
    of: Of = getattr(told, "of", "activations")
    closer: Closer | None = getattr(told, "closer", None)
    return Candidate(name, of, closer, function, digest)


def _takes(function: Callable[..., Any]) -> str:
    told = function.func if isinstance(function, functools.partial) else function
    return str(getattr(told, "takes", "numpy"))


def _plain(found: Any) -> Any:
    return found.detach().cpu().numpy() if isinstance(found, Tensor) else found


def _file_digest(spec: str) -> str:
    path = Path(spec[: spec.index(".py:") + 3]).expanduser()
    return hashlib.sha256(path.read_bytes() + spec.encode()).hexdigest()


def _source_digest(function: Callable[..., Any]) -> str:
    """Of the source where it can be read; else of the name: without resume it is tried again."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(type(function)))}"
