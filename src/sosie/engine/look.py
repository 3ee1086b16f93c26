"""What of a model can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..capture import Rule, unwrap
from ..models import NamedModel
from .sources import ModelSource
from .stream import Stream


def look_at(
    model: nn.Module | NamedModel, data: Any, *, sites: Any = "leaves", rows: Rule = "flatten"
) -> list[tuple[str, tuple[int, ...], int, str]]:
    """Label, shape, width and kind of each site, in execution order; `data` may be the shape of one input."""
    named = model if isinstance(model, NamedModel) else NamedModel(model, type(model).__name__, None, "")
    if isinstance(data, tuple) and all(isinstance(part, int) for part in data):
        data = torch.rand(2, *data, generator=torch.Generator().manual_seed(0))
    source = ModelSource(named.model, named.name, sites, rows, named.prepare)
    with source.opened():
        side = source.look(Stream.of(data, [source]).first)
    modules = dict(unwrap(named.model).named_modules())
    kinds = [type(modules.get(label.partition("@")[0], named.model)).__name__ for label in side.sites]
    return list(zip(side.sites, side.shapes, side.widths, kinds, strict=True))
