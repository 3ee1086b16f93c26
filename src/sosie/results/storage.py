"""Results as versioned JSON that round-trips exactly and is refused in words when it is damaged."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np

from ..files import COUNT, DamagedFile, OtherFile, check_schema, read_json, write_json
from .collection import Comparisons
from .comparison import ARRAYS, Array, Caveat, Closer, Comparison, Estimate, Kind, Side

if TYPE_CHECKING:
    from .answers import Answer
    from .benchmark import Costs, Leaderboard
    from .dynamics import Dynamics


T = TypeVar("T")
FORMAT = "sosie-comparison"
VERSION = 2  # of the files of all results
FARTHEST = 1e100  # the largest bound; larger ones cannot be squared

SIDE = {
    "name": str,
    "sites": [str],
    "widths": [int],
    "shapes": [[int]],
    "dtypes?": [str],
    "left_out?": [[str]],
}
ESTIMATE = {  # arrays are checked as they are read
    "n": COUNT,
    "statistic": str,
    "closer": get_args(Closer),
    "bounds": [(float, None)],
    "same": (float, None),
    "caveats": [{"text": str, "site_a": (None, str), "site_b": (None, str)}],
}
COMPARISON = {
    "side_a": SIDE,
    "side_b": SIDE,
    "rows_rule": str,
    "provenance": {},
    "values": {str: ESTIMATE},
    "kind?": get_args(Kind),
}


def load(path: str | os.PathLike[str]) -> Comparison | Comparisons | Costs | Dynamics | Leaderboard | Answer:
    """Read a file that `save` of any result wrote.

    The checksum in the file must fit. A file that you edited by hand is read once its "hash" is null; files from before
    there were checksums are read as they are.
    """
    from .answers import ANSWER, answer_from_json
    from .benchmark import COST, LEADERBOARD, costs_from_json, leaderboard_from_json
    from .dynamics import DYNAMICS, dynamics_from_json

    readers: dict[str, Callable[..., Any]] = {
        FORMAT: from_json,
        COST: costs_from_json,
        DYNAMICS: dynamics_from_json,
        LEADERBOARD: leaderboard_from_json,
        ANSWER: answer_from_json,
    }
    content = read_json(path, tuple(readers), VERSION, "result")
    try:
        return readers[content["format"]](content, path)
    except DamagedFile:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged: {error}") from error


def load_as(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Read a result that must be of this class."""
    result = load(path)
    if not isinstance(result, kind):
        raise OtherFile(f"{path} holds {type(result).__name__}, not {kind.__name__}")
    return result


def save(result: Comparison | Comparisons, path: str | os.PathLike[str]) -> Path:
    if isinstance(result, Comparison):
        content = _comparison_as_json(result)
    else:
        pairs = [{"i": i, "j": j, **_comparison_as_json(c)} for (i, j), c in result.pairs.items()]
        content = {"names": list(result.names), "pairs": pairs}
    return write_json(path, {"format": FORMAT, "version": VERSION, **content})


def _comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "side_a": asdict(comparison.side_a),
        "side_b": asdict(comparison.side_b),
        "rows_rule": comparison.rows_rule,
        "provenance": comparison.provenance,
        "values": {name: estimate_as_json(values) for name, values in comparison.values.items()},
        "kind": comparison.kind,
    }


def estimate_as_json(values: Estimate, arrays: Iterable[str] = ARRAYS) -> dict[str, Any]:
    content = {f.name: getattr(values, f.name) for f in fields(values) if f.name not in ARRAYS}
    content["caveats"] = [asdict(caveat) for caveat in values.caveats]
    return content | {name: None if (a := getattr(values, name)) is None else _nested(a) for name in arrays}


def _nested(array: Array) -> Any:
    """Python writes the shortest decimal that reads back as the same float64; an undefined value is null."""
    if array.ndim > 1:
        return [_nested(row) for row in array]
    return [float(v) if math.isfinite(v) else None for v in array]


def from_json(content: dict[str, Any], path: str | os.PathLike[str]) -> Comparison | Comparisons:
    if "pairs" not in content:
        return _comparison(content, path)
    check_schema(path, content, {"names": [str], "pairs": [{"i": int, "j": int}]})
    pairs = {(pair["i"], pair["j"]): _comparison(pair, path) for pair in content["pairs"]}
    names = tuple(content["names"])
    if any(not 0 <= i < j < len(names) for i, j in pairs):
        raise ValueError(f"pairs {sorted(pairs)} do not fit {len(names)} models")
    return Comparisons(names, pairs)


def _comparison(content: dict[str, Any], path: str | os.PathLike[str]) -> Comparison:
    check_schema(path, content, COMPARISON)
    side_a, side_b = side_from_json(content["side_a"]), side_from_json(content["side_b"])
    shape = (len(side_a.sites), len(side_b.sites))
    values = {name: estimate_from_json(each, shape) for name, each in content["values"].items()}
    kind = content.get("kind") or _kind_of(content["rows_rule"], values, side_a)
    return Comparison(side_a, side_b, values, content["rows_rule"], content["provenance"], kind)


def _kind_of(rule: str, values: dict[str, Estimate], side: Side) -> Kind:
    """The kind of a comparison whose file does not name it, as files of the first versions do not."""
    if {"mean_embedding", "kernel_norm"} <= set(values):
        return "transfer"
    if {"agreement_b", "cross_entropy"} <= set(values):
        return "stitching"
    if rule == "outputs":
        return "shifts" if len(side.sites) > 1 else "outputs"
    if rule in ("tensors", "entries of the input"):
        return "weights"
    return "sketches" if rule.endswith(" kernel") else "representations"


def estimate_from_json(content: dict[str, Any], shape: tuple[int, ...]) -> Estimate:
    """An estimate from content that fits the schema."""
    arrays: dict[str, Any] = {name: _array(content.get(name), shape) for name in ARRAYS}
    if arrays["value"] is None:
        raise ValueError("a measure without values")
    for name in ("p", "p_search"):
        if arrays[name] is not None and ((arrays[name] < 0) | (arrays[name] > 1)).any():
            raise ValueError(f"{name} lies between 0 and 1")
    low, high = content["bounds"]
    if any(bound is not None and abs(bound) > FARTHEST for bound in (low, high)):
        raise ValueError(f"no measure is bounded by {low} and {high}")
    if low is not None and high is not None and not low < high:
        raise ValueError(f"bounds go from {low} to {high}")
    return Estimate(
        **arrays,
        n=content["n"],
        statistic=content["statistic"],
        closer=content["closer"],
        bounds=(low, high),
        same=content["same"],
        caveats=tuple(Caveat(c["text"], c["site_a"], c["site_b"]) for c in content["caveats"]),
    )


def side_from_json(content: dict[str, Any]) -> Side:
    """A side from what `asdict` made of it, which fits the schema."""
    return Side(
        name=content["name"],
        sites=tuple(content["sites"]),
        widths=tuple(content["widths"]),
        shapes=tuple(map(tuple, content["shapes"])),
        dtypes=tuple(content.get("dtypes", ())),
        left_out=tuple((site, why) for site, why in content.get("left_out", ())),
    )


def _array(nested: Any, shape: tuple[int, ...]) -> Array | None:
    if nested is None:
        return None
    leaves = nested
    for _ in shape[1:]:
        leaves = [item for part in leaves for item in part]
    if not {type(leaf) for leaf in leaves} <= {float, int, type(None)}:
        raise TypeError("an array of values holds something that is not a number")
    array = np.array(nested, dtype=np.float64)  # null becomes NaN
    if array.shape != shape and array.size:
        raise ValueError(f"values of shape {array.shape}, the sites make it {shape}")
    return array.reshape(shape)
