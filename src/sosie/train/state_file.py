"""Nested states to and from a safetensors file: tensors as they are, the rest as JSON beside them. Never unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..results import DamagedFile, read_tensors, write_atomically

KIND, VERSION = "training", 1
PLAIN = (type(None), bool, int, float, str)


def write_state(path: Path, about: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Whole or not at all: a kill leaves the file that was there before."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    layout = _encode(state, "", tensors)
    text = {
        "format": f"sosie-{KIND}",
        "version": str(VERSION),
        "about": json.dumps(about),
        "layout": json.dumps(layout),
    }
    # As bytes: save_file has a temporary file of its own, which a kill would leave behind.
    write_atomically(path, save(tensors, metadata=text))


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was said about it, and the state, its tensors on the CPU."""
    text, tensors = read_tensors(path, KIND, VERSION)
    try:
        return json.loads(text["about"]), _decode(json.loads(text["layout"]), tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON holds of a value; tensors are cloned, since safetensors refuses those that share memory."""
    if isinstance(value, Tensor):
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}
    if isinstance(value, Mapping):
        # Pairs, since an optimiser's names are numbers, which JSON would make text.
        return {"dict": [[name, _encode(item, _below(key, name), tensors)] for name, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, _below(key, k), tensors) for k, item in enumerate(value)]}
    if not isinstance(value, PLAIN):
        raise TypeError(
            f"{key} is a {type(value).__name__}, which a checkpoint cannot hold: state_dict() is to give tensors, "
            "numbers and text, or lists and dicts of them"
        )
    return {"value": value}


def _below(key: str, name: Any) -> str:
    if not isinstance(name, (str, int)):
        raise TypeError(f"{key} has an entry called {name!r}: a checkpoint holds names that are text or whole numbers")
    return f"{key}/{name}" if key else str(name)


def _decode(found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if "tensor" in found:
        return tensors[found["tensor"]]
    if "dict" in found:
        return {name: _decode(item, tensors) for name, item in found["dict"]}
    if "list" in found:
        return [_decode(item, tensors) for item in found["list"]]
    if "tuple" in found:
        return tuple(_decode(item, tensors) for item in found["tuple"])
    return found["value"]
