"""What answers: a model that is run on each batch, or predictions that were made earlier."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import (
    Chunk,
    answer_in,
    as_found,
    by_input,
    labels_of,
    mixing_note,
    model_arguments,
    read_npz,
    read_safetensors,
    restored_after_errors,
)
from ..models import NamedModel, open_model, weights_of, with_name
from ..process_state import products
from ..results import Side
from ..stats import Answers, Reader
from .one_shot import as_outputs
from .provenance import describe_inputs, describe_model

SITE = "output"


@dataclass
class Answering(ABC):
    """A model, or its predictions; `reader` says what its outputs are."""

    name: str
    reader: Reader
    device: str | torch.device | None = None
    side: Side | None = None  # known once a batch has been answered

    @abstractmethod
    def identity(self) -> object:
        """Equal for those that would give the same outputs."""

    @abstractmethod
    def describe(self) -> str: ...

    def mixing(self, batch: Any) -> str | None:
        """Whether the inputs of a batch are mixed, in words; None: they are not, or it cannot be known any more."""
        return None

    @abstractmethod
    def outputs(self, chunk: Chunk) -> Tensor: ...

    def opened(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def answer(self, chunk: Chunk, meeting_place: torch.device | None) -> Answers:
        """What this one says to the inputs of a chunk, on the device where answers meet."""
        self.reader.name = self.name
        outputs = self.outputs(chunk)
        if not outputs.ndim or len(outputs) != chunk.count:
            raise ValueError(
                f"{self.name}: {chunk.count} inputs gave outputs of shape {tuple(outputs.shape)}; "
                "their first dimension must count the inputs"
            )
        if self.side is None:
            shape, dtype = tuple(outputs.shape[1:]), str(outputs.dtype).removeprefix("torch.")
            self.side = Side(self.name, (SITE,), (int(np.prod(shape)),), (shape,), (dtype,))
        with products():
            return self.reader.read(outputs.to(meeting_place or _can_count(outputs.device)))


@dataclass
class ModelAnswering(Answering):
    """A model, run on every batch."""

    model: nn.Module = field(kw_only=True)
    prepare: Callable[[Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    weights: str = ""  # where they are from, if that is known

    def identity(self) -> object:
        return id(self.model), id(self.prepare)

    def describe(self) -> str:
        return describe_model(self.model, self.name, self.weights, describe_inputs(self.prepare))

    @contextmanager
    def opened(self) -> Iterator[Any]:
        with restored_after_errors(self.model), as_found(self.model, self.device):
            yield self

    @property
    def home(self) -> torch.device | None:
        """The model's device; None if it holds no numbers."""
        first = next(itertools.chain(self.model.parameters(), self.model.buffers()), None)
        return None if first is None else first.device

    def arguments(self, chunk: Chunk) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with: copies, on its device."""
        return model_arguments(
            chunk.batch, model=self.model, inputs=self.inputs, prepare=self.prepare, device=self.home
        )

    def mixing(self, batch: Any) -> str | None:
        return mixing_note(self.name, self.model, batch, lambda chunk: {SITE: by_input(self.outputs(chunk))})

    def outputs(self, chunk: Chunk) -> Tensor:
        try:
            args, kwargs = self.arguments(chunk)
            output = self.model(*args, **kwargs)
        except Exception as error:
            error.add_note(f"while running {self.name} on inputs {chunk.start} to {chunk.start + chunk.count - 1}")
            raise
        found = answer_in(output)
        if found is None:
            raise ValueError(f"{self.name} returned no tensor but {type(output).__name__}")
        return found if found.layout == torch.strided else found.to_dense()


@dataclass
class SavedAnswering(Answering):
    """Predictions made earlier; row i belongs to input i."""

    saved: Tensor = field(kw_only=True)

    def identity(self) -> object:
        return id(self.saved)

    def describe(self) -> str:
        return f"{self.name}: saved outputs, {len(self.saved)} inputs"

    def outputs(self, chunk: Chunk) -> Tensor:
        stop = chunk.start + chunk.count
        if stop > len(self.saved):
            raise ValueError(
                f"need outputs of the same inputs: {self.name} has {len(self.saved)} saved, but the data goes on to "
                f"input {stop}"
            )
        found = self.saved[chunk.start : stop]
        return found if self.device is None else found.to(self.device)


@dataclass
class Labels:
    """The right classes: an array, a function of the batch, or (None) what the batches themselves hold."""

    given: Any = None

    def __post_init__(self) -> None:
        if self.given is not None and not callable(self.given):
            self.given = as_outputs(self.given, "labels")

    def of(self, chunk: Chunk) -> Tensor | None:
        if isinstance(self.given, Tensor):
            stop = chunk.start + chunk.count
            if stop > len(self.given):
                raise ValueError(f"need a label for each input: {len(self.given)} labels, but input {stop} is to come")
            return self.given[chunk.start : stop]
        if self.given is None:
            return labels_of(chunk.batch)
        found = self.given(chunk.batch)
        return None if found is None else as_outputs(found, "labels")


def open_answering(
    thing: Any,
    name: str | None,
    *,
    kind: str,
    prepare: Callable[[Any], Any] | None,
    inputs: Callable[[Any], Any] | None,
    device: str | torch.device | None,
) -> Answering:
    """From a module, a specification, an array, {name: array}, or a .npz or .safetensors file with one array."""
    if isinstance(thing, Mapping):
        if len(thing) != 1:
            raise ValueError(f"one side is one model: {{name: array}} with one entry, got {len(thing)}")
        ((name, thing),) = ((str(key), value) for key, value in thing.items())
    if isinstance(thing, (str, os.PathLike)):
        thing = _open(thing)
    if isinstance(thing, _SavedFile):
        thing, name = thing.array, name or thing.name
    if isinstance(thing, (np.ndarray, Tensor)):
        name = name or "predictions"
        return SavedAnswering(name, Reader(name, kind), device, saved=as_outputs(thing, name))
    weights = weights_of(thing)
    thing, own, prepare = with_name(thing, prepare)
    if not isinstance(thing, nn.Module):
        raise TypeError(
            f"cannot compare the outputs of {own}: give a torch.nn.Module, a specification like "
            "'tiny10@weights.safetensors', or predictions (an array, {name: array}, .npz, .safetensors)"
        )
    name = name or own
    reader = Reader(name, kind)
    return ModelAnswering(name, reader, device, model=thing, prepare=prepare, inputs=inputs, weights=weights)


@dataclass(frozen=True)
class _SavedFile:
    array: Any
    name: str


def _open(text: str | os.PathLike[str]) -> NamedModel | _SavedFile:
    path = Path(text)
    if path.suffix not in (".npz", ".safetensors") or ("@" in str(text) and not path.is_file()):
        return open_model(str(text))
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    stored = (read_npz if path.suffix == ".npz" else read_safetensors)(path)
    if len(stored) != 1:
        raise ValueError(
            f"{path} holds {len(stored)} arrays ({', '.join(list(stored)[:5])}): one side is one array of predictions; "
            "in Python {name: array, …} compares several"
        )
    ((_, found),) = stored.items()
    if found.dtype == "object":
        raise ValueError(f"{path} holds objects, which only unpickling could read; save numbers")
    return _SavedFile(found.read(0, found.shape[0]), path.stem)


def _can_count(device: torch.device) -> torch.device:
    """Where answers meet: the first model's device, if it can count in float64."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")
