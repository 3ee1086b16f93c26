"""Measures under test (sosie's own, functions in files, any callable), and their values over many pairs."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..checks import one_of
from ..engine.evaluate import CONSTANT_IN_FLOAT32, view_of
from ..factory import is_factory, load_function
from ..linalg import side_by_side
from ..measures import MEASURES, Measure, find, snap_to_bounds
from ..results import Closer, Comparisons
from ..stats import Alignment, Atoms, LinearMaps, PairedRows, Sample
from ..weights import compare_weights
from ..weights.tensors import ALL
from .population import SLOW, Scale

Of = Literal["activations", "models"]


@dataclass(frozen=True)
class Candidate:
    """A measure under test: what it compares, its direction, and how many images it gets."""

    name: str
    of: Of
    closer: Closer | None  # None: not known yet
    run: Measure | Callable[[Any, Any], Any]
    made_of: str  # distinguishes versions of a user's function
    rows: int | None = None  # images at most
    notes: tuple[str, ...] = ()

    def value(self, x: Any, y: Any) -> float:
        """One number from a user's function of two (n, p) arrays, or of two networks."""
        assert not isinstance(self.run, Measure)
        if isinstance(x, Tensor) and _declared(self.run, "takes") in (None, "numpy"):
            x, y = (side.cpu().numpy() for side in (x, y))
        output = self.run(x, y)
        value = np.asarray(output.detach().cpu() if isinstance(output, Tensor) else output, dtype=np.float64)
        if value.size != 1:
            raise ValueError(f"{self.name} returned an array of shape {value.shape}, not one number")
        if not np.isfinite(value).all():
            raise ValueError(f"{self.name} returned {value.item()}")
        return float(value.item())


def open_candidates(
    measures: Sequence[Any] | Any | None,
    scale: Scale,
    *,
    of: Of | None = None,
    closer: Closer | None = None,
    rows: int | None = None,
) -> list[Candidate]:
    """The measures to test; None: all of sosie's measures of activations and of weights."""
    if measures is None:
        measures = [m for m in MEASURES.values() if (m.reads_layers or m.reads_weights) and m.reads is not Atoms]
    measures = measures if isinstance(measures, (list, tuple)) else [measures]
    candidates = [_open(measure, scale, of, closer, rows) for measure in measures]
    names = [candidate.name for candidate in candidates]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} given twice: every measure needs a name of its own")
    if not candidates:
        raise ValueError("no measures to test")
    return candidates


def _open(measure: Any, scale: Scale, of: Of | None, closer: Closer | None, rows: int | None) -> Candidate:
    if isinstance(measure, str) and is_factory(measure):
        function, name = load_function(measure), measure.rpartition(":")[2]
        path = Path(measure[: measure.index(".py:") + 3]).expanduser()
        digest = hashlib.sha256(path.read_bytes() + measure.encode()).hexdigest()
    elif isinstance(measure, (str, Measure)):
        return _of_measure(find(measure), scale, rows)
    elif callable(measure):
        function, name, digest = measure, getattr(measure, "__name__", type(measure).__name__), _source_digest(measure)
    else:
        raise TypeError(f"a measure is a name, file.py:function or a callable f(x, y), not {measure!r}")
    kind: Any = one_of(of or _declared(function, "of") or "activations", "of", ("activations", "models"))
    direction = closer or _declared(function, "closer")
    if direction not in ("up", "down", None):
        raise ValueError(f"closer must be 'up' (larger is more similar) or 'down', got {direction!r}")
    return Candidate(name, kind, direction, function, digest, rows or scale.test)


def _of_measure(measure: Measure, scale: Scale, rows: int | None) -> Candidate:
    if measure.reads_outputs:
        raise ValueError(f"{measure.name} compares the answers of models, by which measures are judged here")
    if measure.reads_entries:
        raise ValueError(
            f"{measure.name} compares entry by entry; neurons of different networks do not belong together"
        )
    if measure.reads_repetitions:
        raise ValueError(f"{measure.name} compares repeated responses; networks here answer once")
    if measure.reads is Atoms:
        raise ValueError(f"{measure.name} compares convolutions that share coefficients; networks here have none")
    of: Of = "models" if measure.reads_weights else "activations"
    most, why = scale.test, ""
    if issubclass(measure.reads, PairedRows):
        most, why = min(most, scale.paired_rows), "its cost grows with the square of their number"
    if measure.base in SLOW and SLOW[measure.base][0] < most:
        most, why = SLOW[measure.base]
    if rows is not None:
        most, why = min(rows, scale.test), "set by rows="
    limited = of == "activations" and most < scale.test
    notes = (f"sees at most {most} of {scale.test} images: {why}",) if limited else ()
    return Candidate(measure.name, of, measure.closer, measure, "sosie", most, notes)


def _declared(function: Callable[..., Any], name: str) -> Any:
    """An attribute that a function may declare: `f.of`, `f.closer`, `f.takes`."""
    return getattr(function.func if isinstance(function, functools.partial) else function, name, None)


def _source_digest(function: Callable[..., Any]) -> str:
    """A digest of the function's source if it can be read, otherwise its name."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(type(function)))}"


# The values of a measure over many pairs of networks; the work on a single network is done once

Pairs = Sequence[tuple[int, int]]
OVER_BUDGET = "not reached within the scale's budget of seconds"


@dataclass
class CandidateValues:
    """Values in the order of the pairs, NaN if undefined, and the count of each reason."""

    values: np.ndarray
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def defined(self) -> np.ndarray:
        return np.isfinite(self.values)


def values_of(
    candidate: Candidate,
    networks: Sequence[Any],
    pairs: Pairs,
    *,
    inputs: Tensor | None = None,
    rows: int | None = None,
    deadline: float = math.inf,
) -> CandidateValues:
    """The values of pairs of networks, or of their (n, p) activations; NaN, with the reason, if undefined.

    `inputs` are those of the networks, flattened, for measures that need them. `rows`: use only the first rows of
    activations and inputs. `deadline`: the time (of `time.monotonic`) after which no further pair is started.
    """
    if candidate.of == "activations":
        networks, inputs = [x[:rows] for x in networks], None if inputs is None else inputs[:rows]
    if not isinstance(candidate.run, Measure):
        return _one_by_one(lambda i, j: candidate.value(networks[i], networks[j]), pairs, deadline)
    if candidate.of == "models":
        return _of_weights(candidate.run, networks, pairs)
    return _of_rows(candidate.run, networks, pairs, inputs, deadline)


def _of_rows(
    measure: Measure, rows: Sequence[Tensor], pairs: Pairs, inputs: Tensor | None, deadline: float
) -> CandidateValues:
    sample = Sample.of(rows, rows, inputs=inputs if "inputs" in measure.needs else None)
    varies = (sample.spread[0] > CONSTANT_IN_FLOAT32).tolist()
    table: Tensor | None = None  # the values of all pairs, for measures that give them at once

    def value(i: int, j: int) -> float:
        measure.check_widths(rows[i].shape[1], rows[j].shape[1])
        if not (varies[i] and varies[j]):
            raise ValueError("the last hidden layer of a network does not vary over these images")
        value = measure(view_of(measure, sample, i, j)) if table is None else table[i, j]
        if not bool(torch.isfinite(value)):
            raise ValueError("one side is zero after centring")
        return float(snap_to_bounds(value, measure))

    with torch.no_grad():
        if issubclass(measure.reads, Alignment):
            table = measure(sample.alignment(measure.reads)).cpu()
            return _one_by_one(value, pairs)
        return _one_by_one(value, pairs, deadline, threads=not rows[0].is_cuda)


def _one_by_one(
    value: Callable[[int, int], float], pairs: Pairs, deadline: float = math.inf, *, threads: bool = False
) -> CandidateValues:
    """The values of all pairs. A pair that fails is undefined; if all fail, the first error is raised."""
    reasons: Counter[str] = Counter()
    errors: list[Exception] = []

    def of_pair(pair: tuple[int, int]) -> float:
        if time.monotonic() > deadline:
            reasons[OVER_BUDGET] += 1
            return np.nan
        try:
            return value(*pair)
        except Exception as error:
            errors.append(error)
            reasons[f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)] += 1
            return np.nan

    if threads and len(pairs) > 1:
        with closing(side_by_side(of_pair, pairs)) as in_turn:
            values = np.array(list(in_turn), dtype=np.float64)
    else:
        values = np.array([of_pair(pair) for pair in pairs], dtype=np.float64)
    if errors and len(errors) == len(pairs) and not isinstance(errors[0], ValueError):
        raise errors[0]
    return CandidateValues(values, reasons)


def _of_weights(measure: Measure, models: Sequence[nn.Module], pairs: Pairs) -> CandidateValues:
    """From end to end if the measure reads maps; otherwise the mean over layers, which both networks must have."""
    whole = issubclass(measure.reads, LinearMaps)
    site = "output" if whole else None
    table = compare_weights(list(models), None, measure, sites_a=site) if whole and len(models) > 2 else None

    def value(i: int, j: int) -> float:
        pair: Any
        if isinstance(table, Comparisons) and i != j:
            pair = table.pairs[min(i, j), max(i, j)]
        else:
            pair = compare_weights(models[i], models[j], measure, sites_a=site, sites_b=site)
        values = pair[measure.name].value
        if values.shape[0] != values.shape[1]:
            raise ValueError("the networks do not have the same tensors")
        # "all" has no spectrum, and its tensors count already.
        layers = [k for k, site in enumerate(pair.sites_a) if whole or site != ALL]
        mean = float(np.mean(np.diagonal(values)[layers]))
        if not np.isfinite(mean):
            caveats = [c.text for c in pair[measure.name].caveats if whole or ALL not in (c.site_a, c.site_b)]
            raise ValueError(next(iter(caveats), "undefined"))
        return mean

    return _one_by_one(value, pairs)


def gather(parts: Iterable[CandidateValues]) -> CandidateValues:
    """Concatenate the values of several parts."""
    parts = list(parts)
    values = np.concatenate([np.zeros(0), *(part.values for part in parts)])
    return CandidateValues(values, sum((part.reasons for part in parts), Counter()))
