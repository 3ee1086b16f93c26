"""Nested values to and from a safetensors file: tensors as they are, the rest as JSON beside them. Never unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import DamagedFile, read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = (type(None), bool, int, float, str)


def write_nested(path: str | os.PathLike[str], kind: str, version: int, about: Mapping[str, Any], value: Any) -> Path:
    """Dicts, lists and tuples of tensors, numbers and text; whole or not at all: a kill leaves what was there."""
    tensors: dict[str, Tensor] = {}
    layout = _encode(value, "", tensors)
    text = {"about": json.dumps(about), "layout": json.dumps(layout, ensure_ascii=False)}
    return write_tensors(path, kind, version, tensors, text)


def read_nested(path: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, Any], Any]:
    """What was said about the value, and the value, its tensors on the CPU."""
    text, tensors = read_tensors(path, kind, version)
    try:
        about = json.loads(text["about"])
        if not isinstance(about, dict):
            raise TypeError("what is said about it is no JSON object")
        return about, _decode(json.loads(text["layout"]), tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON holds of a value, the tensors of which are gathered apart."""
    from torch import Tensor

    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, Mapping):
        # Pairs, since an optimiser's names are numbers, which JSON would make text.
        return {"dict": [[name, _encode(item, _below(key, name), tensors)] for name, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, _below(key, k), tensors) for k, item in enumerate(value)]}
    if not isinstance(value, PLAIN):
        raise TypeError(
            f"{key or 'the whole'} is a {type(value).__name__}, which cannot be kept in a file: only tensors, numbers "
            "and text, or tuples, lists and dicts of them, can"
        )
    return {"value": value}


def _below(key: str, name: Any) -> str:
    if not isinstance(name, (str, int)):
        raise TypeError(f"{key} has an entry called {name!r}: only text and whole numbers can be kept in a file")
    return f"{key}/{name}" if key else str(name)


def _decode(found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = found.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {name: _decode(item, tensors) for name, item in value}
    if kind in ("tuple", "list"):
        items = [_decode(item, tensors) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "value" and isinstance(value, PLAIN):
        return value
    raise ValueError(f"values of kind {str(kind)[:40]!r}")
