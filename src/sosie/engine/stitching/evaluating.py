"""How well B does its job with A's representation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...capture import as_found, labels_of
from ...progress import Progress
from .halves import Stitched, chunks_of
from .tally import Tally


@dataclass(frozen=True)
class Stitch:
    """A stitched network, and how its joint was found."""

    model: Stitched
    fit: str
    report: dict[str, Any]
    n: int  # rows that the fit rests on
    history: list[dict[str, float]] = field(default_factory=list)  # of training: the start, each epoch

    def __repr__(self) -> str:
        """Which two networks, where and how: without their modules, which fill a screen."""
        a, b = self.model.lower, self.model.upper
        ends = f"{a.name} up to {a.cut.site.label!r}, {b.name} from {b.cut.site.label!r} on"
        return f"Stitch({ends}, fit={self.fit!r}, n={self.n})"

    def evaluate(self, data: Any, *, max_rows: int | None = None) -> dict[str, float]:
        """How well B does its job with A's representation, on data that should not be those of the fit.

        agreement_a, agreement_b: share of inputs that get the same answer as from A, from B. cross_entropy: to B's
        soft answers, in nats. With labels also accuracy, accuracy_a, accuracy_b, and relative_accuracy, which is the
        accuracy over B's (left out where B gets nothing right).
        """
        halves = self.model.lower, self.model.upper
        tally = Tally()
        with as_found(self.model), Progress("evaluating the stitched network", None, "inputs") as bar:
            for chunk in chunks_of(data, max_rows):
                a, b = (half.answer(chunk.batch) for half in halves)
                tally.add(self.model(chunk.batch), a, b, labels_of(chunk.batch))
                bar.advance(chunk.count)
        return {**tally.numbers(), "n": float(tally.n)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the joint, and how it was found, as safetensors that `Stitch.load` reads; the models are not in it."""
        from .files import save_stitch

        return save_stitch(self, path)

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        model_a: Any,
        model_b: Any,
        *,
        example: Any = None,
        prepare_a: Callable[[Any], Any] | None = None,
        prepare_b: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
    ) -> Stitch:
        """The stitched network that `save` wrote, of the same two models (modules or specifications).

        Models whose weights are others than those it was saved with are refused. `prepare_a`, `prepare_b` and `inputs`
        are functions, which no file holds: give those that `stitch` was given. `example`: a batch of data to try the
        cuts on; needed only where the models take more than tensors, else numbers of the right shape are made up.
        """
        from .files import load_stitch

        return load_stitch(path, model_a, model_b, example, prepare_a, prepare_b, inputs)
