"""What compare is given, as sources: models, saved activations, or the names of either."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ..capture import SavedActivations, open_activations
from ..models import NamedModel, open_model, weights_of, with_name
from ..stats import is_statistics as is_statistics_file
from .settings import Settings
from .sources import ModelSource, SavedSource


def arguments_of(model_a: Any, model_b: Any, data: Any) -> tuple[list[Any], Any]:
    """The things compared and the data, from compare(a, b, data) or compare([a, b, c], data)."""
    if isinstance(model_a, (list, tuple)) and not isinstance(model_a, nn.Module):
        if data is not None and model_b is not None:
            raise TypeError("with a list of models, there is no second model: compare([m1, m2, m3], data)")
        if len(model_a) < 2 and not (model_a and is_statistics(model_a[0])):
            raise ValueError(f"need at least two models to compare, got {len(model_a)}")
        return list(model_a), model_b if data is None else data
    if model_b is None:
        if is_statistics(model_a):
            return [model_a], data
        raise TypeError("compare needs two models (the same one twice is fine), or a list of them and data")
    return [model_a, model_b], data


# What is neither a model nor activations knows how to compare itself: in the package that its kind of file names.
ROOMS = {"sketch": "sosie.sketching"}


def room_of(thing: Any) -> Any:
    """The package that compares such things, for an object or a file; None for models, activations and statistics."""
    if isinstance(thing, (str, os.PathLike)):
        if Path(thing).suffix != ".safetensors":
            return None
        kinds = [kind for kind in ROOMS if is_statistics_file(thing, kind=kind)]
    else:
        kinds = [kind for kind in ROOMS if getattr(type(thing), "kind", None) == kind]
    return import_module(ROOMS[kinds[0]]) if kinds else None


def is_statistics(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike)) and Path(thing).suffix == ".safetensors" and is_statistics_file(thing)


def open_source(text: str | os.PathLike[str], *, seed: int = 0) -> NamedModel | SavedActivations | str:
    """What a text names: a model, saved activations, or (as it is) a file of saved statistics or a sketch."""
    path = Path(text)
    if is_statistics(path) or room_of(path) is not None:
        return str(text)
    if path.suffix in (".npz", ".safetensors") and ("@" not in str(text) or path.is_file()):
        return open_activations(path)
    return open_model(str(text), seed=seed)


def source_of(
    thing: Any, sites: Any, prepare: Callable[[Any], Any] | None, settings: Settings, inputs: Any
) -> ModelSource | SavedSource:
    if isinstance(thing, (str, os.PathLike)):
        thing = open_source(thing)
    if isinstance(thing, Mapping):
        thing = open_activations(thing)
    if isinstance(thing, SavedActivations):
        return SavedSource(thing, Path(thing.name).stem, sites, settings.rows, settings.device)
    weights = weights_of(thing)
    thing, name, prepare = with_name(thing, prepare)
    if not isinstance(thing, nn.Module):
        raise TypeError(
            f"cannot compare {name}: give a torch.nn.Module, a specification like 'tiny10@weights.safetensors', "
            "or saved activations ({site: array}, .npz, .safetensors). Data come third: compare(model, model, data) "
            "holds the layers of one network against each other"
        )
    return ModelSource(thing, name, sites, settings.rows, prepare, inputs, settings.device, weights)
