"""Statistics to and from a safetensors file: tensors as they are, the rest as JSON beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..files import DamagedFile, read_tensors, write_tensors
from .grams import Drift, Grams, PairSums, ShuffledSums
from .moments import Moments, SideSums
from .sample import Sample

VERSION = 2
_CLASSES: dict[str, type] = {}


def storable(*classes: type) -> None:
    """Dataclasses that statistics are made of: files name them, and nothing else is made from a file."""
    _CLASSES.update({cls.__name__: cls for cls in classes})


storable(Drift, Grams, PairSums, Moments, SideSums, Sample, ShuffledSums)


def save_statistics(
    statistics: dict[str, Any], path: str | os.PathLike[str], *, kind: str = "statistics", **about: Any
) -> Path:
    """Write statistics by name, and JSON about them; `kind` distinguishes such files from others."""
    tensors: dict[str, Tensor] = {}
    layout = {name: _encode(statistic, name, tensors) for name, statistic in statistics.items()}
    return write_tensors(path, kind, VERSION, tensors, {"layout": json.dumps(layout), "about": json.dumps(about)})


def load_statistics(path: str | os.PathLike[str], *, kind: str = "statistics") -> tuple[dict[str, Any], dict[str, Any]]:
    """The statistics by name, and the JSON about them."""
    text, tensors = read_tensors(path, kind, VERSION)
    try:
        layout, about = json.loads(text["layout"]), json.loads(text["about"])
        return {name: _decode(found, tensors) for name, found in layout.items()}, about
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def is_statistics(path: str | os.PathLike[str], *, kind: str = "statistics") -> bool:
    """Whether a safetensors file says that it holds statistics, or a sketch."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            return (opened.metadata() or {}).get("format") == f"sosie-{kind}"
    except (SafetensorError, OSError):
        return False


def moved(statistic: Any, *, like: Any) -> Any:
    """A statistic on the device that another one of its kind is on."""
    device = next(_tensors(like)).device
    return statistic if next(_tensors(statistic)).device == device else on_device(statistic, device)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))


def on_device(value: Any, device: torch.device) -> Any:
    """A statistic with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_device(getattr(value, f.name), device) for f in fields(value)})
    return value


def _encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors are collected separately."""
    if isinstance(value, np.ndarray):
        tensors[key] = torch.from_numpy(value)
        return {"array": key}
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if is_dataclass(value):
        kept = [f for f in fields(value) if f.metadata.get("kept", True)]
        found = {f.name: _encode(getattr(value, f.name), f"{key}.{f.name}", tensors) for f in kept}
        return {"class": type(value).__name__, "fields": found}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, f"{key}.{i}", tensors) for i, item in enumerate(value)]}
    return {"value": value}


def _decode(found: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    if "array" in found:
        return tensors[found["array"]].numpy()
    if "tensor" in found:
        return tensors[found["tensor"]]
    if "class" in found:
        return _CLASSES[found["class"]](**{name: _decode(item, tensors) for name, item in found["fields"].items()})
    if "tuple" in found:
        return tuple(_decode(item, tensors) for item in found["tuple"])
    return found["value"]
