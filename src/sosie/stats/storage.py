"""Statistics to and from a safetensors file, and from one device to another."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import decode, encode, read_tensors, reading, storable, write_tensors
from .grams import Drift, Grams, PairSums, ShuffledSums
from .moments import Moments, SideSums
from .sample import Sample

VERSION = 2

storable(Drift, Grams, PairSums, Moments, SideSums, Sample, ShuffledSums)


def save_statistics(
    statistics: dict[str, Any], path: str | os.PathLike[str], *, kind: str = "statistics", **about: Any
) -> Path:
    """Write statistics by name, and JSON about them; `kind` distinguishes such files from others."""
    tensors: dict[str, Tensor] = {}
    layout = {name: encode(statistic, name, tensors) for name, statistic in statistics.items()}
    return write_tensors(path, kind, VERSION, tensors, {"layout": json.dumps(layout), "about": json.dumps(about)})


def load_statistics(path: str | os.PathLike[str], *, kind: str = "statistics") -> tuple[dict[str, Any], dict[str, Any]]:
    """The statistics by name, and the JSON about them."""
    text, tensors = read_tensors(path, kind, VERSION)
    with reading(path):
        layout, about = json.loads(text["layout"]), json.loads(text["about"])
        return {name: decode(found, tensors) for name, found in layout.items()}, about


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
