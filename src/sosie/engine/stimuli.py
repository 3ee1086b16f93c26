"""What models are shown: the inputs as they are, or each of them under several shifts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..capture import Chunk, answer_in, model_arguments, without_labels
from ..data.shifts import Shift
from .answering import SITE, Answering, ModelAnswering

Key = tuple[str, int | None]  # a shift, and the model it is against
AS_THEY_ARE: Key = (SITE, None)


@dataclass(frozen=True)
class Stimuli:
    """No shifts: one site, "output". Shifts: a site for each, and two for an attack, on A and on B."""

    shifts: tuple[Shift, ...] = ()
    seed: int = 0
    inputs: Callable[[Any], Any] | None = None

    @property
    def wants_labels(self) -> bool:
        return any(shift.attack is not None and shift.attack.needs_labels for shift in self.shifts)

    def sites(self, pair: tuple[int, int]) -> dict[str, Key]:
        """The sites of a pair of models, by name."""
        if not self.shifts:
            return {SITE: AS_THEY_ARE}
        found: dict[str, Key] = {}
        for shift in self.shifts:
            if shift.is_against_a_model:
                found |= {f"{shift.label} on {side}": (shift.label, k) for side, k in zip("AB", pair, strict=True)}
            else:
                found[shift.label] = (shift.label, None)
        return found

    def of(self, chunk: Chunk, sources: Mapping[int, Answering], labels: Tensor | None) -> dict[Key, Chunk]:
        """The chunk under every shift, each attack on every model."""
        if not self.shifts:
            return {AS_THEY_ARE: chunk}
        images = self._images(chunk.batch)
        index = torch.arange(chunk.start, chunk.start + chunk.count)
        found: dict[Key, Chunk] = {}
        for shift in self.shifts:
            if not shift.is_against_a_model:
                changed = shift.of_any_model(images, seed=self.seed, index=index)
                found[shift.label, None] = replace(chunk, batch=changed)
                continue
            for k, source in sources.items():
                assert shift.attack is not None
                moved = images.to(_home(source))
                changed = shift.attack(_logits_of(source, chunk), moved, labels, seed=self.seed, index=index)
                found[shift.label, k] = replace(chunk, batch=changed)
        return found

    def unchanged(self, batch: Any) -> Any:
        """What the models are given of a batch under no shift."""
        return self._images(batch) if self.shifts else batch

    def _images(self, batch: Any) -> Tensor:
        images = without_labels(batch) if self.inputs is None else self.inputs(batch)
        if isinstance(images, (tuple, list)) and len(images) == 1:
            images = images[0]
        if not isinstance(images, Tensor) or not images.is_floating_point():
            what = str(images.dtype) if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"shifts change images, a tensor of floats in [0, 1], but a batch gives {what}")
        return images


def check_shiftable(sources: list[Answering]) -> None:
    if saved := [source.name for source in sources if not isinstance(source, ModelAnswering)]:
        raise TypeError(f"shifts need models to show changed inputs to, but {saved[0]} is saved predictions")


def _logits_of(source: Answering, chunk: Chunk) -> Callable[[Tensor], Tensor]:
    """What the model answers to images, as numbers whose softmax is its prediction."""
    assert isinstance(source, ModelAnswering)

    def logits(images: Tensor) -> Tensor:
        args, kwargs = model_arguments(images, prepare=source.prepare)
        found = answer_in(source.model(*args, **kwargs))
        assert found is not None
        return found.log() if source.reader.kind == "probabilities" else found

    if source.reader.kind == "auto":
        source.answer(chunk, None)  # the first answer decides what the outputs are
    if source.reader.kind not in ("logits", "probabilities"):
        raise ValueError(f"{source.name}: attacks need logits or probabilities over classes, not {source.reader.kind}")
    return logits


def _home(source: Answering) -> torch.device:
    assert isinstance(source, ModelAnswering)
    return source.home or torch.device("cpu")
