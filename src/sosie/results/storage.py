"""Results as versioned JSON that round-trips exactly and is refused in words when it is damaged."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import DamagedFile, read_json, write_json
from .collection import Comparisons
from .comparison import ARRAYS, Array, Caveat, Comparison, Estimate, Side

if TYPE_CHECKING:
    from .answers import Answer
    from .benchmark import Costs
    from .dynamics import Dynamics


FORMAT = "sosie-comparison"
VERSION = 2
FARTHEST = 1e100  # a bound; larger ones, squared, are no numbers any more


def save(result: Comparison | Comparisons, path: str | os.PathLike[str]) -> Path:
    return write_json(path, as_json(result))


def load(path: str | os.PathLike[str]) -> Comparison | Comparisons | Costs | Dynamics | Answer:
    """Read what `save` of a `Comparison`, `Comparisons`, `Costs` or `Dynamics`, or of what a zoo answered, wrote.

    The checksum in the file must fit. One that you edited by hand is read once its "hash" is null; files from before
    there were checksums are read as they are.
    """
    from .answers import ANSWER, answer_from_json
    from .benchmark import COST, costs_from_json
    from .dynamics import DYNAMICS, dynamics_from_json

    readers = {FORMAT: from_json, COST: costs_from_json, DYNAMICS: dynamics_from_json, ANSWER: answer_from_json}
    found = read_json(path, tuple(readers), VERSION, "comparison")
    try:
        return readers[found["format"]](found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def as_json(result: Comparison | Comparisons) -> dict[str, Any]:
    head = {"format": FORMAT, "version": VERSION}
    if isinstance(result, Comparisons):
        pairs = [{"i": i, "j": j, **_comparison_as_json(c)} for (i, j), c in result.pairs.items()]
        return {**head, "names": list(result.names), "pairs": pairs}
    return {**head, **_comparison_as_json(result)}


def from_json(found: dict[str, Any]) -> Comparison | Comparisons:
    if "pairs" not in found:
        return _comparison_from_json(found)
    pairs = {(int(p["i"]), int(p["j"])): _comparison_from_json(p) for p in found["pairs"]}
    names = tuple(map(str, found["names"]))
    if any(not 0 <= i < j < len(names) for i, j in pairs):
        raise ValueError(f"pairs {sorted(pairs)} do not fit {len(names)} models")
    return Comparisons(names, pairs)


def _comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "side_a": asdict(comparison.side_a),
        "side_b": asdict(comparison.side_b),
        "rows_rule": comparison.rows_rule,
        "provenance": comparison.provenance,
        "values": {name: _values_as_json(values) for name, values in comparison.values.items()},
    }


def _comparison_from_json(found: dict[str, Any]) -> Comparison:
    side_a, side_b = side_from_json(found["side_a"]), side_from_json(found["side_b"])
    shape = (len(side_a.sites), len(side_b.sites))
    return Comparison(
        side_a=side_a,
        side_b=side_b,
        rows_rule=_text(found["rows_rule"]),
        provenance=dict(found["provenance"]),
        values={_text(name): _values(values, shape) for name, values in found["values"].items()},
    )


def _values_as_json(values: Estimate) -> dict[str, Any]:
    found = {f.name: getattr(values, f.name) for f in fields(values)}
    found["caveats"] = [asdict(caveat) for caveat in values.caveats]
    for kind in ARRAYS:
        found[kind] = _array_as_json(getattr(values, kind))
    return found


def _values(found: dict[str, Any], shape: tuple[int, int]) -> Estimate:
    if int(found["n"]) < 0:
        raise ValueError(f"a negative number of rows: {found['n']}")
    if found["closer"] not in ("up", "down"):
        raise ValueError(f"closer is {found['closer']!r}, not 'up' or 'down'")
    arrays: dict[str, Any] = {kind: _array(found.get(kind), shape) for kind in ARRAYS}
    if arrays["value"] is None:
        raise ValueError("a measure without values")
    bounds = bounds_from_json(found["bounds"])
    for kind in ("p", "p_search"):
        if arrays[kind] is not None and ((arrays[kind] < 0) | (arrays[kind] > 1)).any():
            raise ValueError(f"{kind} lies between 0 and 1")
    caveats = tuple(
        Caveat(_text(c["text"]), *(None if c[s] is None else _text(c[s]) for s in ("site_a", "site_b")))
        for c in found["caveats"]
    )
    return Estimate(
        **arrays,
        n=int(found["n"]),
        statistic=_text(found["statistic"]),
        closer=found["closer"],
        bounds=bounds,
        same=None if found["same"] is None else _real(found["same"]),
        caveats=caveats,
    )


def bounds_from_json(found: Any) -> tuple[float | None, float | None]:
    low, high = (None if bound is None else _real(bound) for bound in _list(found))
    if any(bound is not None and abs(bound) > FARTHEST for bound in (low, high)):
        raise ValueError(f"no measure is bounded by {low} and {high}")
    if low is not None and high is not None and not low < high:
        raise ValueError(f"bounds go from {low} to {high}")
    return low, high


def side_from_json(found: dict[str, Any]) -> Side:
    """A side as `asdict` gives it."""
    return Side(
        name=_text(found["name"]),
        sites=tuple(map(_text, found["sites"])),
        widths=tuple(int(w) for w in found["widths"]),
        shapes=tuple(tuple(int(s) for s in shape) for shape in found["shapes"]),
        dtypes=tuple(map(_text, found.get("dtypes", ()))),
        left_out=tuple((_text(site), _text(why)) for site, why in found.get("left_out", ())),
    )


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"expected text, got {found!r}")
    return found


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise TypeError(f"expected a list, got {found!r}")
    return found


def _real(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        raise TypeError(f"expected a number, got {found!r}")
    return float(found)


def _array_as_json(array: Array | None) -> list[list[float | None]] | None:
    """Python writes the shortest decimal that reads back as the same float64; an undefined value is null."""
    if array is None:
        return None
    return [[float(v) if math.isfinite(v) else None for v in row] for row in array]


def _array(found: Any, shape: tuple[int, int]) -> Array | None:
    if found is None:
        return None
    array = np.array(
        [[math.nan if v is None else _real(v) for v in _list(row)] for row in _list(found)], dtype=np.float64
    )
    if array.shape != shape and array.size:
        raise ValueError(f"values of shape {array.shape} for {shape[0]} x {shape[1]} sites")
    return array.reshape(shape)
