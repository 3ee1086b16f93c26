"""What a model's outputs say: a class, a distribution over classes, or numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..linalg import for_numpy, once

Kind = Literal["auto", "logits", "probabilities", "labels", "regression"]
KINDS: tuple[str, ...] = get_args(Kind)
SUMS_TO_ONE = 1e-3  # how far half precision may put the sum of a row of probabilities from 1
MOST_CLASSES = 2**20  # a class number beyond this is taken for something else


@dataclass(frozen=True)
class Answers:
    """One model's outputs for some inputs, made once however many models they are compared with."""

    kind: str
    width: int  # classes, or numbers an input; 1 for labels, which do not tell how many classes there are
    predicted: Tensor | None = None  # (n,) class numbers
    scores: Tensor | None = None  # (n, classes) logits or probabilities, float64
    values: Tensor | None = None  # (n, d) float64
    ties: int = 0  # inputs with several largest outputs, of which the first is taken

    @once
    def log_p(self) -> Tensor | None:
        """(n, classes): log-probabilities; made when first asked for, since labels are enough for most measures."""
        if self.scores is None:
            return None
        if self.kind == "logits":
            return torch.log_softmax(self.scores, 1)
        return (self.scores / self.scores.sum(1, keepdim=True)).log()

    def __len__(self) -> int:
        found = self.values if self.predicted is None else self.predicted
        assert found is not None
        return len(found)


class Reader:
    """Reads one model's outputs, batch after batch: the first batch decides their kind, where it is not given."""

    def __init__(self, name: str, kind: str = "auto") -> None:
        if kind not in KINDS:
            raise ValueError(f"kind is one of {', '.join(KINDS)}, got {kind!r}")
        self.name, self.kind, self._given = name, kind, kind != "auto"
        self._width: int | None = None

    def learnt(self) -> tuple[str, int | None]:
        """What the first batch decided, for another process to begin with."""
        return self.kind, self._width

    def learn(self, decided: tuple[str, int | None]) -> None:
        self.kind, self._width = decided

    def read(self, outputs: Tensor) -> Answers:
        """(n,) labels or numbers, (n, classes) logits or probabilities, (n, d) numbers."""
        if outputs.is_complex():
            raise TypeError(f"{self.name}: outputs are complex ({outputs.dtype})")
        if not _sums_up(outputs) and (bad := int((~torch.isfinite(outputs)).sum())):
            raise ValueError(
                f"{self.name}: {bad} of {outputs.numel()} outputs are NaN or infinite. Check the input's normalisation "
                "and the weights; a class that is masked out can have a large negative logit instead"
            )
        if self.kind == "auto":
            self.kind = _kind_of(outputs, self.name)
        found: Answers = getattr(self, f"_{self.kind}")(outputs)
        if self._width not in (None, found.width):
            raise ValueError(f"{self.name}: {found.width} outputs an input, but {self._width} in an earlier batch")
        self._width = found.width
        return found

    def _labels(self, outputs: Tensor) -> Answers:
        return Answers("labels", 1, check_labels(outputs, f"{self.name}: predicted labels"))

    def _logits(self, outputs: Tensor) -> Answers:
        scores = self._by_class(outputs)
        return Answers("logits", scores.shape[1], *_largest(scores))

    def _probabilities(self, outputs: Tensor) -> Answers:
        p = self._by_class(outputs)
        sums = p.sum(1, keepdim=True)
        wrong = (p < 0).any(1) | ((sums[:, 0] - 1).abs() > SUMS_TO_ONE)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            hint = "" if self._given else "; earlier rows looked like probabilities: say kind='logits' if they are not"
            raise ValueError(
                f"{self.name}: {int(wrong.sum())} of {len(p)} rows are no probabilities, e.g. one that sums to "
                f"{float(sums[row].detach()):.6g} with smallest entry {float(p[row].min().detach()):.3g}{hint}"
            )
        return Answers("probabilities", p.shape[1], *_largest(p))

    def _regression(self, outputs: Tensor) -> Answers:
        values = outputs.double()[:, None] if outputs.ndim == 1 else outputs.double()
        if values.ndim != 2 or not values.shape[1]:
            raise ValueError(f"{self.name}: numbers to compare are (n,) or (n, d), got shape {tuple(outputs.shape)}")
        return Answers("regression", values.shape[1], values=values)

    def _by_class(self, outputs: Tensor) -> Tensor:
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise ValueError(
                f"{self.name}: {self.kind} are (n, classes) with at least 2 classes, got shape {tuple(outputs.shape)}"
            )
        return outputs.double()


def check_labels(labels: Tensor, name: str, classes: int | None = None) -> Tensor:
    """Class numbers (n,) from 0 up, below `classes` where that is known."""
    if labels.ndim != 1:
        raise ValueError(f"{name} are (n,) class numbers, got shape {tuple(labels.shape)}")
    whole = labels.long()
    if labels.is_floating_point() and not bool((whole == labels).all()):
        raise ValueError(f"{name} are class numbers, got {labels.dtype} that are not whole")
    if not len(whole):
        return whole
    low, high = (int(edge) for edge in torch.aminmax(whole))
    if low < 0 or high >= (classes or MOST_CLASSES):
        known = f"there are {classes} classes" if classes else f"classes are numbered from 0, below {MOST_CLASSES}"
        raise ValueError(f"{name} lie between {low} and {high}, but {known}")
    return whole


def _sums_up(outputs: Tensor) -> bool:
    """Whether a sum, which is soon made, shows that all of them are finite."""
    return for_numpy(outputs) and math.isfinite(outputs.numpy().sum())


def _largest(scores: Tensor) -> tuple[Tensor, Tensor, None, int]:
    if for_numpy(scores):  # torch would first wake its threads, which takes longer
        array = scores.numpy()
        first = array.argmax(1)
        equal = array == np.take_along_axis(array, first[:, None], 1)
        ties = 0 if np.count_nonzero(equal) == len(array) else np.count_nonzero(equal.sum(1) > 1)
        return torch.from_numpy(first), scores, None, int(ties)
    tied = (scores == scores.amax(1, keepdim=True)).sum(1) > 1
    return scores.argmax(1), scores, None, int(tied.sum())


def _kind_of(outputs: Tensor, name: str) -> str:
    """What outputs are by their look; where two kinds look alike, an error that asks."""
    shape = tuple(outputs.shape)
    if outputs.ndim not in (1, 2):
        raise ValueError(
            f"{name}: outputs of shape {shape}; compared are (n,) labels, (n, classes) logits or probabilities, or "
            "(n, d) numbers: choose one answer an input in a module of your own around the model"
        )
    if not outputs.is_floating_point():
        if outputs.ndim == 1:
            return "labels"
        raise ValueError(f"{name}: whole numbers of shape {shape} may be counts, one-hot labels or scores: say kind=")
    if outputs.ndim == 1:
        if len(outputs) and bool((outputs == outputs.round()).all()):
            raise ValueError(
                f"{name}: floating-point outputs that are all whole may be labels or numbers: "
                "say kind='labels' or kind='regression'"
            )
        return "regression"
    if shape[1] == 1:
        raise ValueError(
            f"{name}: one output an input (shape {shape}) may be a number or the logit of one of two classes: say "
            "kind='regression', or give labels (n,) or both classes (n, 2)"
        )
    sums = outputs.double().sum(1)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() <= SUMS_TO_ONE).all()):
        return "probabilities"
    return "logits"
