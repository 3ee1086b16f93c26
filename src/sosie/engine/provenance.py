"""Where a result came from: versions, time, models, data, settings."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import torch
from torch import nn

from .. import __version__


def provenance(**about: Any) -> dict[str, Any]:
    """JSON-ready facts; `data` and `test` are described by what they call themselves."""
    found = {
        "sosie": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    for key, value in about.items():
        if value is not None:
            found[key] = _describe(value) if key in ("data", "test") else value
    return found


def describe_model(model: nn.Module, name: str, weights: str, inputs: str = "") -> str:
    """One line; `weights` is what is known of them, see `models.weights_of`."""
    count = sum(parameter.numel() for parameter in model.parameters())
    parts = [type(model).__name__, f"{count:,} parameters", weights, inputs]
    return f"{name}: {', '.join(filter(None, parts))}"


def describe_inputs(prepare: Any) -> str:
    return "inputs as given" if prepare is None else f"inputs prepared by {prepare!r}"


def _describe(data: Any) -> str:
    if isinstance(data, str):
        return data
    if isinstance(data, torch.Tensor):
        return f"tensor {tuple(data.shape)}"
    return str(getattr(data, "name", type(data).__name__))
