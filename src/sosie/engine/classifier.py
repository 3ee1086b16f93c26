"""Classifiers and the labels that they themselves would give: p(y|x) from the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture import Batches, Chunk, recut
from ..data import open_data
from ..progress import Progress
from ..stats import row_hash
from .answering import ModelAnswering, open_answering


class Classifier(ModelAnswering):
    """A model that is run for its logits, (n, classes); any other answer is an error in words."""

    def outputs(self, chunk: Chunk) -> Tensor:
        logits = super().outputs(chunk)
        shape, dtype = tuple(logits.shape), str(logits.dtype).removeprefix("torch.")
        if len(shape) != 2 or shape[0] != chunk.count or shape[1] < 2 or not logits.is_floating_point():
            raise ValueError(
                f"{self.name}: p(y|x) is read from logits (n, classes) with at least two classes, but {chunk.count} "
                f"inputs gave outputs of shape {shape} and type {dtype}"
            )
        return logits

    def log_p(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The logits and their log-probabilities, both in float64."""
        self.reader.name = self.name
        answers = self.reader.read(logits.detach() if logits.device.type in ("cpu", "cuda") else logits.detach().cpu())
        if answers.scores is None or answers.log_p is None or answers.kind != "logits":
            raise ValueError(
                f"{self.name}: the outputs are {answers.kind}, not logits: leave the softmax at the end out"
            )
        return answers.scores, answers.log_p


def open_classifier(
    model: Any,
    *,
    prepare: Callable[[Any], Any] | None,
    inputs: Callable[[Any], Any] | None,
    device: str | torch.device | None,
) -> Classifier:
    """From a module or a model's specification."""
    found = open_answering(model, None, kind="auto", prepare=prepare, inputs=inputs, device=device)
    if not isinstance(found, ModelAnswering):
        raise TypeError(f"{found.name}: saved predictions have no parameters; give the model itself")
    options = {"model": found.model, "prepare": found.prepare, "inputs": found.inputs, "weights": found.weights}
    return Classifier(found.name, found.reader, found.device, **options)  # type: ignore[arg-type]


@contextmanager
def chunks_of(source: Classifier, data: Any, max_rows: int | None, task: str) -> Iterator[Iterator[Chunk]]:
    """The model as `as_found` makes it, and the data in the loader's batches, counted on the terminal."""
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    batches = Batches(open_data(data) if isinstance(data, str) else data)
    total = batches.total if max_rows is None or batches.total is None else min(batches.total, max_rows)

    def counted(bar: Progress) -> Iterator[Chunk]:
        for chunk in recut(batches, block=None, max_rows=max_rows):
            yield chunk
            bar.advance(chunk.count)

    with source.opened(), Progress(f"{task} of {source.name}", total, "inputs") as bar:
        yield counted(bar)


def drawn_labels(log_p: Tensor, start: int, *, seed: int, draw: int) -> Tensor:
    """(n,) one class an input from its own p; a number of the input's index in the whole data, whatever the batch."""
    own = int(row_hash(np.array([draw]), seed)[0])
    hashes = row_hash(np.arange(start, start + len(log_p)), own)
    uniform = torch.from_numpy((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53).to(log_p.device)
    shares = log_p.exp().cumsum(1)
    # Scaled by the last sum, which rounding keeps from 1: the class found always has p > 0.
    return torch.searchsorted(shares, (uniform * shares[:, -1])[:, None], right=True)[:, 0]
