"""The probe set of a zoo as one file: tensors as they are, their structure as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..capture import without_labels
from ..engine.digest import digest_of
from ..results import DamagedFile, write_atomically
from .fingerprints import MOST_PROBES, Probe

FORMAT, VERSION = "sosie-probe", 1
OTHERWISE = "inputs are tensors, texts and numbers, in tuples, lists and dicts"


def save_probe(probe: Probe, path: Path) -> Path:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    layout = _encode(probe.batch, tensors)
    head = {"format": FORMAT, "version": str(VERSION), "n": str(probe.n), "hash": probe.digest}
    head["layout"] = json.dumps(layout, ensure_ascii=False)
    return write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=head))


def load_probe(path: Path, digest: str | None = None) -> Probe:
    """The inputs, whose hash is computed anew: the file must hold what it says, and what was asked for."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            head = opened.metadata() or {}
            if head.get("format") != FORMAT or head.get("version") != str(VERSION):
                raise DamagedFile(f"{path} holds no probe set that this sosie can read")
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FileNotFoundError(f"the probe set is gone: no file {path}") from None
    except (SafetensorError, OSError) as error:
        raise DamagedFile(f"{path} cannot be read as safetensors: {error}") from error
    try:
        batch, n = _decode(json.loads(head["layout"]), tensors), int(head["n"])
        found = digest_of(without_labels(batch))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
    wanted = head.get("hash") if digest is None else digest
    if found != wanted or not 0 < n <= MOST_PROBES:
        raise DamagedFile(f"{path} holds {n} inputs of hash {found}, the zoo was made with those of hash {wanted}")
    return Probe(batch, n, found)


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = f"tensor{len(tensors)}"
        tensors[key] = value.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share memory
        return {"tensor": key}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"a probe set with {type(value).__name__} in it cannot be kept: {OTHERWISE}")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a probe set whose dicts have keys like {key!r} cannot be kept: keys are text")
    return key


def _decode(found: Any, tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = found.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {_key(key): _decode(item, tensors) for key, item in value}
    if kind in ("tuple", "list"):
        items = [_decode(item, tensors) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "value" and (value is None or isinstance(value, (bool, int, float, str))):
        return value
    raise ValueError(f"inputs of kind {str(kind)[:40]!r}; {OTHERWISE}")
