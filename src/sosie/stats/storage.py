"""Save statistics to safetensors files and load them, and move them between devices."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import DamagedFile, decode, encode, read_tensors, reading, storable, write_tensors
from .grams import Drift, Grams, PairSums, ShuffledSums
from .moments import Moments, SideSums
from .outputs import OutputSums, ValueSums
from .sample import Sample
from .splits import SplitMoments

VERSION = 2

storable(Drift, Grams, PairSums, Moments, SideSums, Sample, ShuffledSums, SplitMoments, OutputSums, ValueSums)


def save_statistics(
    statistics: dict[str, Any], path: str | os.PathLike[str], *, kind: str = "statistics", **about: Any
) -> Path:
    """Write statistics by name, and JSON about them; `kind` is the format of the file."""
    tensors: dict[str, Tensor] = {}
    layout = {name: encode(statistic, name, tensors) for name, statistic in statistics.items()}
    return write_tensors(path, kind, VERSION, tensors, {"layout": json.dumps(layout), "about": json.dumps(about)})


def load_statistics(path: str | os.PathLike[str], *, kind: str = "statistics") -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the statistics by name, and the JSON about them."""
    text, tensors = read_tensors(path, kind, VERSION)
    with reading(path):
        layout, about = json.loads(text["layout"]), json.loads(text["about"])
        return {name: decode(item, tensors) for name, item in layout.items()}, about


def is_statistics(path: str | os.PathLike[str], *, kind: str = "statistics") -> bool:
    """Return whether a safetensors file is of this kind, by its header; raise DamagedFile if that cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            return (opened.metadata() or {}).get("format") == f"sosie-{kind}"
    except (SafetensorError, OSError) as error:
        if Path(path).suffix == ".safetensors" and Path(path).is_file():
            raise DamagedFile(f"{path} cannot be read as safetensors: {error}; was it cut off or changed?") from error
        return False


def moved(statistic: Any, *, like: Any) -> Any:
    """The statistic on the device of another of its kind."""
    device = next(tensors_of(like)).device
    return statistic if next(tensors_of(statistic)).device == device else on_device(statistic, device)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a statistic."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for f in fields(value):
            yield from tensors_of(getattr(value, f.name))


def on_device(value: Any, device: torch.device) -> Any:
    """The statistic with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_device(getattr(value, f.name), device) for f in fields(value)})
    return value
