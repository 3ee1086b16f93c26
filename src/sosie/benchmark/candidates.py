"""What is put to the test: one of sosie's measures, a function in a file, or any callable."""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..engine.pairs import CONSTANT_IN_FLOAT32, check_widths, view_of
from ..factory import is_factory, load_function
from ..linalg import side_by_side
from ..measures import MEASURES, Measure, find, snap_to_bounds
from ..results import Closer, Comparisons
from ..stats import Alignment, Atoms, LinearMaps, PairedRows, Sample
from .population import SLOW, Scale

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


# A measure's values over many pairs of networks; what belongs to one network is worked out once

Pairs = Sequence[tuple[int, int]]


@dataclass
class CandidateValues:
    """Values in the order of the pairs, NaN where undefined, and how often for which reason."""

    values: np.ndarray
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def defined(self) -> np.ndarray:
        return np.isfinite(self.values)


class Clock:
    """A budget of seconds, shared by several calls."""

    def __init__(self, budget: float) -> None:
        self.budget, self._end = budget, time.monotonic() + budget

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end

    @property
    def reason(self) -> str:
        return f"not reached within the budget of {self.budget:g} s"


def values_of(
    candidate: Candidate,
    things: Sequence[Tensor] | Sequence[nn.Module],
    pairs: Pairs,
    *,
    inputs: Tensor | None = None,
    clock: Clock | None = None,
) -> CandidateValues:
    """The measure on pairs of (n, p) activations, or of networks; a pair that has no value says why.

    `inputs` are what the networks were given, flattened, for measures that need it.
    """
    if not isinstance(candidate.run, Measure):
        return _one_by_one(lambda i, j: candidate.value(things[i], things[j]), pairs, clock)
    if candidate.of == "models":
        return _of_weights(candidate.run, things, pairs)  # type: ignore[arg-type]
    return _of_rows(candidate.run, things, pairs, inputs, clock)  # type: ignore[arg-type]


def _of_rows(
    measure: Measure, rows: Sequence[Tensor], pairs: Pairs, inputs: Tensor | None, clock: Clock | None
) -> CandidateValues:
    sample = Sample.of(rows, rows, inputs=inputs if "inputs" in measure.needs else None)
    varies = (sample.spread[0] > CONSTANT_IN_FLOAT32).tolist()
    with torch.no_grad():
        if issubclass(measure.reads, Alignment):
            matrix = snap_to_bounds(measure(sample.alignment(measure.reads)), measure).cpu()
            return _one_by_one(lambda i, j: _finite(matrix[i, j], varies, i, j), pairs, None)

        def value(i: int, j: int) -> float:
            check_widths(measure, rows[i].shape[1], rows[j].shape[1])
            if not (varies[i] and varies[j]):
                return _finite(torch.tensor(torch.nan), varies, i, j)
            return _finite(snap_to_bounds(measure(view_of(measure.reads, sample, i, j)), measure), varies, i, j)

        return _one_by_one(value, pairs, clock, threads=not rows[0].is_cuda)


def _finite(value: Tensor, varies: Sequence[bool], i: int, j: int) -> float:
    if not (varies[i] and varies[j]):
        raise ValueError("the last hidden layer of a network does not vary over these images")
    if not bool(torch.isfinite(value)):
        raise ValueError("nothing of one side is left once it is centred")
    return float(value)


def _one_by_one(
    value: Callable[[int, int], float], pairs: Pairs, clock: Clock | None, *, threads: bool = False
) -> CandidateValues:
    """A failure on some pairs leaves those undefined; one on all pairs is the measure's own."""
    reasons: Counter[str] = Counter()
    errors: list[Exception] = []

    def of_pair(pair: tuple[int, int]) -> float:
        if clock is not None and clock.over:
            reasons[clock.reason] += 1
            return np.nan
        try:
            return value(*pair)
        except Exception as error:
            errors.append(error)
            reasons[f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)] += 1
            return np.nan

    with closing(_in_turn(of_pair, pairs, threads)) as in_turn:
        values = np.array(list(in_turn), dtype=np.float64)
    if errors and len(errors) == len(pairs) and not isinstance(errors[0], ValueError):
        raise errors[0]
    return CandidateValues(values, reasons)


def _in_turn(function: Callable[[tuple[int, int]], float], pairs: Pairs, threads: bool) -> Any:
    if threads and len(pairs) > 1:
        return side_by_side(function, pairs)
    return (function(pair) for pair in pairs)


def _of_weights(measure: Measure, models: Sequence[nn.Module], pairs: Pairs) -> CandidateValues:
    """From end to end where the measure reads maps; else the mean over layers, which both networks must have."""
    from ..weights import compare_weights
    from ..weights.tensors import ALL

    whole = issubclass(measure.reads, LinearMaps)
    sites = {"sites_a": "output"} if whole else {}
    found = compare_weights(list(models), measures=measure, **sites) if whole and len(models) > 2 else None  # type: ignore[arg-type]

    def value(i: int, j: int) -> float:
        if isinstance(found, Comparisons) and i != j:
            pair = found.pairs[min(i, j), max(i, j)]
        else:
            own = {"sites_a": "output", "sites_b": "output"} if whole else {}
            pair = compare_weights(models[i], models[j], measures=measure, **own)  # type: ignore[arg-type,assignment]
        values = pair[measure.name].value
        if values.shape[0] != values.shape[1]:
            raise ValueError("the networks do not have the same tensors")
        # All tensors in a row have no spectrum, and count once already.
        layers = [k for k, site in enumerate(pair.sites_a) if whole or site != ALL]
        mean = float(np.mean(np.diagonal(values)[layers]))
        if not np.isfinite(mean):
            told = [c.text for c in pair[measure.name].caveats if whole or ALL not in (c.site_a, c.site_b)]
            raise ValueError(next(iter(told), "undefined"))
        return mean

    return _one_by_one(value, pairs, None)


def gather(parts: Iterable[CandidateValues]) -> CandidateValues:
    """Several lots, one after the other."""
    lots = list(parts)
    values = np.concatenate([lot.values for lot in lots]) if lots else np.zeros(0)
    return CandidateValues(values, sum((lot.reasons for lot in lots), Counter()))
