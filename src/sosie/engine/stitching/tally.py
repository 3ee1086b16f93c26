"""Counts over what a stitched network answers, and how sure they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

CONFIDENCE = 0.95
PROPORTIONS = ("accuracy", "agreement_b", "agreement_a")


@dataclass
class Tally:
    """Sums over inputs: the stitched network's answers against A's, B's and the labels."""

    n: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, stitched: Tensor, a: Tensor, b: Tensor, labels: Tensor | None) -> None:
        stitched, a, b = (answer.detach().double().cpu() for answer in (stitched, a, b))
        if stitched.ndim != 2 or b.shape != stitched.shape:
            raise ValueError(f"stitched networks are evaluated on (inputs, classes), got {tuple(stitched.shape)}")
        for answers, whose in ((stitched, "the stitched network"), (a, "A"), (b, "B")):
            if bad := int(answers.isnan().flatten(1).any(1).sum()):
                raise ValueError(f"{whose} answers {bad} of {len(answers)} inputs with NaN, which agrees with nothing")
        self.n += len(stitched)
        guess, guess_b = stitched.argmax(1), b.argmax(1)
        lost = F.cross_entropy(stitched, b.softmax(1), reduction="none")
        self._count("cross_entropy", lost)
        self._count("cross_entropy²", lost.square())
        self._count("agreement_b", guess == guess_b)
        if a.shape == stitched.shape:
            self._count("agreement_a", guess == a.argmax(1))
        if labels is not None:
            labels = labels.cpu()
            if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < stitched.shape[1]:
                raise ValueError(
                    f"the labels go from {int(labels.min())} to {int(labels.max())}, but B answers {stitched.shape[1]} "
                    "classes: give data without labels where theirs are others"
                )
            self._count("accuracy", guess == labels)
            self._count("accuracy_b", guess_b == labels)
            self._count("both_right", (guess == labels) & (guess_b == labels))
            if a.shape == stitched.shape:
                self._count("accuracy_a", a.argmax(1) == labels)

    def _count(self, key: str, values: Tensor) -> None:
        self.sums[key] = self.sums.get(key, 0.0) + float(values.sum())

    def numbers(self) -> dict[str, float]:
        """Means over inputs, and relative_accuracy, which is the accuracy over B's (not where B gets nothing right)."""
        found = {key: value / self.n for key, value in self.sums.items() if key not in ("cross_entropy²", "both_right")}
        if found.get("accuracy_b"):
            found["relative_accuracy"] = found["accuracy"] / found["accuracy_b"]
        return found

    def interval(self, key: str) -> tuple[float, float] | None:
        """The 95 % interval of a number, if the inputs are a sample; None where it is not known, or of one input.

        Proportions have Wilson's score interval; the others the error of a mean, with Student's t. relative_accuracy
        is a ratio of two means over the same inputs, so its error is that of the mean of s − r b (the delta method).
        """
        value = self.numbers().get(key)
        if value is None or self.n < 2:
            return None
        if key in PROPORTIONS:
            return wilson(value, self.n)
        if key == "relative_accuracy":
            right, right_b, both = (self.sums[name] for name in ("accuracy", "accuracy_b", "both_right"))
            squares, share = right - 2 * value * both + value**2 * right_b, right_b / self.n
        else:
            squares, share = self.sums["cross_entropy²"] - self.n * value**2, 1.0
        reach = _quantile(self.n) * math.sqrt(max(squares, 0.0) / (self.n * (self.n - 1))) / share  # < 0 by rounding
        return max(value - reach, 0.0), value + reach


def wilson(share: float, n: int) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927): right for shares close to 0 and 1, too."""
    from scipy.special import ndtri

    z = float(ndtri((1 + CONFIDENCE) / 2))
    centre, reach = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max((centre - reach) / (1 + z**2 / n), 0.0), min((centre + reach) / (1 + z**2 / n), 1.0)


def _quantile(n: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
