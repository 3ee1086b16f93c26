"""Checkpoints as a recorded run: read one after the other, and only what is compared is kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import as_found
from ..models import NamedModel, open_model, read_weights, weights_of, with_name
from ..models.weights import masked_weights
from ..progress import track
from .recorder import Probe, Recorder
from .run_folder import Run, open_run

MAX_ROWS = 1024  # inputs that checkpoints are probed with, unless said otherwise
NAME = "checkpoints"


@dataclass(frozen=True)
class Checkpoints:
    """What was given, and what of it is compared."""

    given: Any
    kind: str
    sites: Any
    device: str | torch.device | None
    max_rows: int


def is_checkpoints(thing: Any) -> bool:
    return isinstance(thing, (list, tuple, Mapping)) and not isinstance(thing, nn.Module) and not _is_state(thing)


def _is_state(thing: Any) -> bool:
    return isinstance(thing, Mapping) and any(isinstance(value, Tensor) for value in thing.values())


def recorded(
    checkpoints: Checkpoints, stack: ExitStack, folder: str | os.PathLike[str] | None, *, data: Any, **options: Any
) -> tuple[Run, list[str]]:
    """All of them in one folder, which goes when the stack closes unless it was named; and what is known of weights."""
    told: list[str] = []
    steps = _steps(checkpoints.given)
    place = Path(folder) if folder is not None else Path(stack.enter_context(tempfile.TemporaryDirectory())) / NAME
    probe: Probe | None = None
    kept: dict[str, Any] = {"sites": checkpoints.sites, "by_depth": not _sorted_by_name(checkpoints)}
    for step, name, thing in track(steps, "checkpoints", len(steps), ""):
        try:
            model, given, weights = _opened(thing, checkpoints.kind, options["prepare"])
            told += [f"{name}: step {step}, {weights}"] if weights else []
            if checkpoints.kind == "activations" and (probe is None or given is not options["prepare"]):
                settings = {**options, "prepare": given, "max_rows": checkpoints.max_rows}
                probe = probe.prepared(given) if probe is not None else Probe(data, settings.pop("rows"), **settings)
            with ExitStack() as meanwhile:
                if isinstance(model, nn.Module):
                    meanwhile.enter_context(as_found(model, checkpoints.device))
                recorder = Recorder(place, model, checkpoints.kind, probe=probe, **kept)  # type: ignore[arg-type]
                meanwhile.enter_context(recorder).record(step)
        except Exception as error:
            error.add_note(f"while reading checkpoint {name} (step {step})")
            raise
    return open_run(place), told


def _sorted_by_name(checkpoints: Checkpoints) -> bool:
    """Whether they are read without a model from safetensors, which sorts by name: depth is not known then."""
    given = checkpoints.given
    things = given.values() if isinstance(given, Mapping) else given
    return any(_without_model(thing, checkpoints.kind) and Path(thing).suffix == ".safetensors" for thing in things)


def _without_model(thing: Any, kind: str) -> bool:
    """A file of weights by itself."""
    if kind == "activations" or not isinstance(thing, (str, os.PathLike)):
        return False
    return Path(thing).is_file() and Path(thing).suffix != ".py"


def _steps(given: Any) -> list[tuple[int, str, Any]]:
    """Step, name and checkpoint, in order."""
    pairs = list(given.items()) if isinstance(given, Mapping) else list(enumerate(given))
    if any(isinstance(step, bool) or not isinstance(step, int) or step < 0 for step, _ in pairs):
        raise ValueError(f"steps are whole numbers of at least 0, got {[step for step, _ in pairs][:6]}")
    if len(pairs) < 2:
        raise ValueError(f"need at least two checkpoints to see anything change, got {len(pairs)}")
    return [(step, _name(thing, step), thing) for step, thing in sorted(pairs, key=lambda pair: pair[0])]


def _name(thing: Any, step: int) -> str:
    if isinstance(thing, (str, os.PathLike)):
        return str(thing)
    return thing.name if isinstance(thing, NamedModel) else str(step)


def _opened(thing: Any, kind: str, prepare: Any) -> tuple[Any, Any, str]:
    """A model or a state dict, how its inputs are prepared, and what is known of its weights."""
    if isinstance(thing, (str, os.PathLike)):
        if _without_model(thing, kind):
            return masked_weights(read_weights(thing)[0]), None, ""
        thing = open_model(str(thing))
    if _is_state(thing):
        if kind == "activations":
            raise TypeError("a state dict cannot be run on data: give models or specifications like small_cnn@file")
        return thing, None, ""
    model, _, prepare = with_name(thing, prepare)
    if not isinstance(model, nn.Module):
        raise TypeError(f"a checkpoint is a model, a specification, a state dict or a file, got {type(model).__name__}")
    return model, prepare, weights_of(thing)
