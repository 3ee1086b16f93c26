"""Saved activations in place of a model: what another framework gave for the same inputs, in the same order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..capture import Chunk
from ..capture.calls import Seen
from ..capture.saved import ActivationFile, about_extracted, open_activations
from ..engine.network import OUTPUT
from ..models.values import NotSaved, Value, ValueModel, visit
from .record import Record, is_record
from .replay import Subject


class SavedModel(ValueModel):
    """Saved activations as a model: its forward takes the numbers of the first input and of the one after the last."""

    def __init__(self, file: ActivationFile, name: str = "") -> None:
        super().__init__()
        self.file, self.name = file, name or file.about.get("name") or Path(file.name).stem
        labels = [site.label for site in file.sites]
        self.answer = next((label for label in (OUTPUT, ".") if label in labels), None)
        self.labels = [label for label in labels if label != self.answer]
        for label in self.labels:
            self.add(label, Value(label))
        types = [file.activation(label, 0, 1).dtype for label in labels]
        self.own_dtype = next((dtype for dtype in types if dtype.is_floating_point), torch.float32)
        self.eval()

    def forward(self, start: int, stop: int) -> Tensor | NotSaved:
        if stop > self.file.n:
            raise ValueError(f"{self.file.name} holds {self.file.n} inputs, but the data go on to {stop}")
        run = _Rows(self.file, start, stop)
        visit(self, run)
        return NotSaved() if self.answer is None else run.read(self.answer)


class _Rows:
    def __init__(self, file: ActivationFile, start: int, stop: int) -> None:
        self._file, self._place, self._known = file, (start, stop), dict[str, Tensor]()

    def read(self, key: str) -> Tensor:
        if key not in self._known:
            self._known[key] = self._file.activation(key, *self._place)
        return self._known[key]

    def replace(self, key: str, tensor: Tensor) -> None:
        self._known[key] = tensor


@dataclass
class Saved(Subject):
    """Saved activations as A or B of a diff."""

    @property
    def file(self) -> ActivationFile:
        file: ActivationFile = self.model.file  # type: ignore[assignment]
        return file

    def describe(self) -> str:
        return f"{self.name}: saved activations, {self.file.n} inputs"

    def arguments(self, chunk: Chunk) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (chunk.start, chunk.start + chunk.count), {}

    def mixing(self, batch: Any) -> None:
        return None

    def look_at(self, chunk: Chunk) -> tuple[list[Seen], dict[str, Tensor]]:
        if not self.model.labels:  # the answer alone
            return [], {}
        if self.sites is None:
            self.sites = [(label, None, False) for label in self.model.labels]  # type: ignore[union-attr]
        return super().look_at(chunk)

    def first_inputs(self, batch: Any) -> str | None:
        return self.file.about.get("first_inputs")


def saved_in(thing: Any, data: Any, reference: Record | None = None) -> SavedModel | None:
    """The saved activations that {site: array}, an .npz, a file of `extract` or a second record holds; None for
    anything else.

    Without data a dict of tensors is a state dict.
    """
    if is_record(thing):
        if reference is None:
            raise TypeError(f"a record is the reference, so it comes first: diff({str(thing)!r}, model)")
        record = Record.load(thing)
        if record.about["digest"] != reference.about["digest"]:
            raise ValueError(f"{thing} is a record of other inputs than {reference.path}")
        given = {label: x for label, call in record.calls.items() if (x := call.activation) is not None and x.ndim}
        same = {label: x for label, x in given.items() if len(x) == record.inputs}
        return SavedModel(open_activations(same), record.name)
    if isinstance(thing, Mapping):
        if data is None and all(isinstance(part, Tensor) for part in thing.values()):
            return None
        return SavedModel(open_activations(thing))
    if not isinstance(thing, (str, os.PathLike)) or not (path := Path(thing)).is_file():
        return None
    if path.suffix != ".npz" and not (path.suffix == ".safetensors" and about_extracted(path)):
        return None
    file = open_activations(path)
    if (made_by := file.about.get("rows", "flatten")) != "flatten":
        raise ValueError(
            f"{path} holds rows made by {made_by!r}, and diff compares whole activations: extract them with "
            "rows='flatten'"
        )
    return SavedModel(file)
