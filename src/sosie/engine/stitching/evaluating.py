"""How well B does its job with A's representation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...capture import as_found, labels_of
from ...progress import Progress
from .halves import Stitched, chunks_of


@dataclass(frozen=True)
class Stitch:
    """A stitched network, and how its joint was found."""

    model: Stitched
    fit: str
    report: dict[str, Any] = field(repr=False)
    n: int  # rows that the fit rests on
    history: list[dict[str, float]] = field(default_factory=list, repr=False)  # of training: the start, each epoch

    def evaluate(self, data: Any, *, max_rows: int | None = None) -> dict[str, float]:
        """How well B does its job with A's representation, on data that should not be those of the fit.

        agreement_a, agreement_b: share of inputs that get the same answer as from A, from B. cross_entropy: to B's
        soft answers, in nats. With labels also accuracy, accuracy_a, accuracy_b, and relative_accuracy, which is the
        accuracy over B's (left out where B gets nothing right).
        """
        halves = self.model.lower, self.model.upper
        sums: dict[str, float] = {}
        n = 0
        with as_found(self.model), Progress("evaluating the stitched network", None, "inputs") as bar:
            for chunk in chunks_of(data, max_rows):
                answers = [self.model(chunk.batch), *(half.answer(chunk.batch) for half in halves)]
                for key, value in _counts(answers, labels_of(chunk.batch)).items():
                    sums[key] = sums.get(key, 0.0) + value
                n += chunk.count
                bar.advance(chunk.count)
        found = {key: value / n for key, value in sums.items()}
        if found.get("accuracy_b"):
            found["relative_accuracy"] = found["accuracy"] / found["accuracy_b"]
        return {**found, "n": float(n)}


def _counts(answers: list[Tensor], labels: Tensor | None) -> dict[str, float]:
    """Sums over one chunk: the stitched network's answers against A's, B's and the labels."""
    stitched, a, b = (answer.detach().double().cpu() for answer in answers)
    if stitched.ndim != 2 or b.shape != stitched.shape:
        raise ValueError(f"stitched networks are evaluated on (inputs, classes), got {tuple(stitched.shape)}")
    guess = stitched.argmax(1)
    found = {
        "cross_entropy": float(F.cross_entropy(stitched, b.softmax(1), reduction="sum")),
        "agreement_b": float((guess == b.argmax(1)).sum()),
    }
    if a.shape == stitched.shape:
        found["agreement_a"] = float((guess == a.argmax(1)).sum())
    if labels is not None:
        labels = labels.cpu()
        found["accuracy"] = float((guess == labels).sum())
        found["accuracy_b"] = float((b.argmax(1) == labels).sum())
        if a.shape == stitched.shape:
            found["accuracy_a"] = float((a.argmax(1) == labels).sum())
    return found
