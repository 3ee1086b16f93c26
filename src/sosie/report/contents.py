"""What the page shows, as plain data: names once, numbers rounded, caveats grouped."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..results import Comparison, Comparisons, Side, Values, summarise
from .colour import data_scale, full_scale, ramp
from .words import direction, doubts, extent, flat, in_a_sentence, sentence, sentence_of_all, size, visible

MOST_NUMBERS = 1_000_000  # about 7 MB; beyond it a page of many models leaves the intervals out, and says so
_DOUBT = ("low", "high", "null")

T = TypeVar("T", bound=Hashable)


def contents(result: Comparison | Comparisons) -> dict[str, Any]:
    """Everything the page's script reads."""
    many = isinstance(result, Comparisons)
    pairs = list(result.pairs.items()) if isinstance(result, Comparisons) else [((0, 1), result)]
    brief = many and _numbers(pairs) > MOST_NUMBERS
    sides: dict[Side, int] = {}
    records: dict[tuple[tuple[str, str], ...], int] = {}
    found = []
    for (i, j), comparison in pairs:
        found.append(
            {
                "i": i,
                "j": j,
                "a": _number_of(comparison.side_a, sides),
                "b": _number_of(comparison.side_b, sides),
                "title": title(comparison),
                "rule": visible(comparison.rows_rule),
                "provenance": _number_of(tuple(flat(comparison.provenance)) if comparison.provenance else (), records),
                "measures": [_measure(comparison, name, brief) for name in comparison.values],
            }
        )
    return {
        "ramp": list(ramp()),
        "sides": [_side(side) for side in sides],
        "records": [list(map(list, record)) for record in records],
        "names": [visible(name) for name in result.names] if isinstance(result, Comparisons) else [],
        "models": _models(result) if isinstance(result, Comparisons) else [],
        "pairs": found,
    }


def title(result: Comparison | Comparisons) -> str:
    if isinstance(result, Comparison):
        return f"{in_a_sentence(result.side_a.name)} and {in_a_sentence(result.side_b.name)}"
    names = [in_a_sentence(name) for name in result.names]
    if len(names) > 4:
        return f"{names[0]}, {names[1]} and {len(names) - 2} more models"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def sentences(result: Comparison | Comparisons) -> list[str]:
    """One a measure; the first leads."""
    if isinstance(result, Comparison):
        return [sentence(result, name) for name in result.values]
    return [sentence_of_all(result, name) for name in _shared_measures(result)]


def rounded(array: np.ndarray) -> list[float | int | None]:
    """Row by row; None where undefined.

    4 decimals; 5 significant digits beyond 1; where all are small, 4 significant digits of the largest.
    """
    finite = np.abs(array[np.isfinite(array)])
    largest = float(finite.max()) if finite.size else 0.0
    decimals = 4 if largest >= 0.1 or largest == 0 else 3 - math.floor(math.log10(largest))
    return [_short(v, decimals) for v in array.ravel().tolist()]


def _short(value: float, decimals: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    found = round(value, decimals) if abs(value) <= 1 else float(f"{value:.5g}")
    return int(found) if found.is_integer() and abs(found) < 1e15 else found


def _measure(comparison: Comparison, name: str, brief: bool) -> dict[str, Any]:
    values, summary = comparison[name], summarise(comparison, name)
    found: dict[str, Any] = {
        "name": visible(name),
        "sentence": sentence(comparison, name),
        "partner": list(summary.depth_partner),
        "best": list(summary.best_partner),
        "value": rounded(values.value),
        "n": values.n,
        "statistic": visible(values.statistic),
        "same": None if values.same is None else float(f"{values.same:.6g}"),
        "extent": extent(values.bounds),
        "caveats": [
            {"text": d.text, "reach": d.reach, "all": d.everywhere, "where": [] if d.everywhere else d.where}
            for d in doubts(comparison, name)
        ],
        **_reading(values),
    }
    given = {kind: getattr(values, kind) for kind in _DOUBT if getattr(values, kind) is not None}
    found["dropped"] = list(given) if brief else []
    found.update({} if brief else {kind: rounded(array) for kind, array in given.items()})
    return found


def _reading(values: Values) -> dict[str, Any]:
    full, data = full_scale(values), data_scale(values)
    return {
        "closer": values.closer,
        "direction": direction(values.closer),
        "full": [full.far, full.alike],
        "clipped": full.clipped,
        "data": [data.far, data.alike],
    }


def _models(result: Comparisons) -> list[dict[str, Any]]:
    """A model by model matrix for each measure that every pair has."""
    found = []
    for name in _shared_measures(result):
        matrix = result.matrix(name)
        values = replace(next(iter(result))[name], value=matrix, low=None, high=None, null=None, caveats=())
        found.append({"name": visible(name), "value": rounded(matrix), **_reading(values)})
    return found


def _shared_measures(result: Comparisons) -> list[str]:
    every = [comparison.values for comparison in result]
    return [name for name in (every[0] if every else ()) if all(name in values for values in every)]


def _side(side: Side) -> dict[str, Any]:
    return {
        "name": visible(side.name),
        "sites": [visible(site) for site in side.sites],
        "shapes": [size(shape) for shape in side.shapes],
        "widths": list(side.widths),
    }


def _number_of(item: T, seen: dict[T, int]) -> int:
    return seen.setdefault(item, len(seen))


def _numbers(pairs: list[tuple[tuple[int, int], Comparison]]) -> int:
    return sum(
        values.value.size * (1 + sum(getattr(values, kind) is not None for kind in _DOUBT))
        for _, comparison in pairs
        for values in comparison.values.values()
    )
