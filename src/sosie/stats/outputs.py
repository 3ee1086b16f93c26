"""OutputSums: counts and sums over the paired outputs of two models; memory does not grow with the inputs.

They are kept by group, which a hash of the input's index decides: leaving out each group in turn gives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import one_of
from ..linalg import for_numpy, once
from .grams import GROUPS, by_group, over_groups
from .sampling import dealt_groups

# The views that measures read


@dataclass(frozen=True)
class Outputs:
    """The outputs of two models for the same inputs, as counts: one number, or one for each group left out."""

    n: Tensor


@dataclass(frozen=True)
class Predictions(Outputs):
    """The classes that the models predict."""

    equal: Tensor  # inputs for which both predict the same class


@dataclass(frozen=True)
class MarkedPredictions(Predictions):
    """The classes that the models predict, compared with labels."""

    right_a: Tensor
    right_b: Tensor
    both_right: Tensor


@dataclass(frozen=True)
class Distributions(Outputs):
    """Probabilities of the classes."""

    divergence: Tensor  # Σ Jensen-Shannon divergence, in bits


@dataclass(frozen=True)
class Differences(Outputs):
    """The differences of numeric outputs, d per input."""

    squared: Tensor  # Σ over inputs of the mean squared difference of the d outputs


@dataclass(frozen=True)
class Continuous(Differences):
    """The differences of numeric outputs, and their second moments."""

    xx: Tensor  # (…, d) Σ (x − mean)²
    yy: Tensor  # (…, d)
    xy: Tensor  # (…, d)


# Reading outputs as classes, distributions over classes, or numbers

OUTPUT_KINDS = ("auto", "logits", "probabilities", "labels", "regression")
SUMS_TO_ONE = 1e-3  # how far from 1 a row of probabilities in half precision may sum
NO_CHANCE = 32  # this many logits do not all lie between 0 and 1 by chance
MOST_CLASSES = 2**20  # a larger number is not a class
IGNORED = -100  # the label of a prediction that has no right answer, as in torch and transformers
LOOKED_AT = 8  # tokens that decide whether outputs are logits or probabilities
TOKEN_SLICE = 2**21  # logits of tokens of each model that are held in float64 at a time


@dataclass(frozen=True)
class Answers:
    """One model's outputs for some inputs, read once for all models that they are compared with."""

    kind: str
    width: int  # classes, or numbers per input; 1 for labels, which do not show how many classes there are
    predicted: Tensor | None = None  # (n,) class numbers
    scores: Tensor | None = None  # (n, classes) logits or probabilities, float64; of tokens all, in their own type
    values: Tensor | None = None  # (n, d) float64
    ties: int = 0  # inputs with several largest outputs, of which the first is taken
    tokens: Tensor | None = None  # (n,) of predictions for tokens, their places among the rows of `scores`
    per_input: int = 1  # tokens of an input

    @once
    def log_p(self) -> Tensor | None:
        """(n, classes): log-probabilities, made when first needed, since labels are enough for most measures."""
        if self.scores is None:
            return None
        return self._log(self.scores)

    def _log(self, scores: Tensor) -> Tensor:
        return torch.log_softmax(scores, 1) if self.kind == "logits" else (scores / scores.sum(1, keepdim=True)).log()

    def log_p_by_slice(self) -> Iterator[Tensor]:
        """The log-probabilities of all inputs, or of some tokens at a time."""
        assert self.scores is not None
        if self.tokens is None:
            yield self.log_p  # type: ignore[misc]
            return
        for some in self.tokens.split(max(1, TOKEN_SLICE // self.width)):
            yield self._log(self.scores[some].double())

    def labelled(self, labels: Tensor) -> tuple[Answers, Tensor]:
        """The predictions for tokens that have a label, and their labels."""
        assert self.tokens is not None
        assert self.predicted is not None
        right = labels.reshape(-1).to(self.tokens.device)[self.tokens]
        known = right != IGNORED
        return replace(self, tokens=self.tokens[known], predicted=self.predicted[known]), right[known]

    def __len__(self) -> int:
        rows = self.values if self.predicted is None else self.predicted
        assert rows is not None
        return len(rows)


class Reader:
    """Reads one model's outputs, batch after batch; the first batch decides their kind, unless it is given."""

    def __init__(self, name: str, kind: str = "auto") -> None:
        self.name, self.kind, self._given = name, one_of(kind, "kind", OUTPUT_KINDS), kind != "auto"
        self.width: int | None = None  # that of the first batch
        self.small: int | None = 0  # how many numbers there were, while all lay between 0 and 1; None: not all do

    def read(self, outputs: Tensor, keep: Tensor | None = None) -> Answers:
        """Read (n,) labels or numbers, (n, classes) logits or probabilities, or (n, d) numbers.

        Or (inputs, tokens, vocabulary) logits or probabilities, where `keep` (inputs, tokens) is 0 at padding.
        """
        if outputs.is_complex():
            raise TypeError(f"{self.name}: outputs are complex ({outputs.dtype})")
        if outputs.ndim == 3 and outputs.is_floating_point() and self.kind in ("logits", "probabilities"):
            return self._tokens(outputs, keep)
        sums_up = for_numpy(outputs) and math.isfinite(outputs.numpy().sum())  # fast, and shows that all are finite
        if not sums_up and (bad := int((~torch.isfinite(outputs)).sum())):
            raise ValueError(
                f"{self.name}: {bad} of {outputs.numel()} outputs are NaN or infinite. Check the normalisation of the "
                "input and the weights; give a masked class a large negative logit instead"
            )
        if self.kind == "auto":
            self.kind = _kind_of(outputs, self.name)
        if self.kind == "logits" and not self._given and self.small is not None:
            self.small = self.small + outputs.numel() if _between_0_and_1(outputs) else None
        answers = self._answers(outputs)
        if self.width not in (None, answers.width):
            raise ValueError(f"{self.name}: {answers.width} outputs per input, but {self.width} in an earlier batch")
        self.width = answers.width
        return answers

    def guess_of_tokens(self, outputs: Tensor, keep: Tensor | None) -> None:
        """Decide by a few tokens whether (inputs, tokens, vocabulary) are logits or probabilities, unless given."""
        if self.kind == "auto":
            rows = outputs.detach().flatten(0, 1)
            places = torch.arange(len(rows)) if keep is None else keep.reshape(-1).nonzero()[:, 0]
            self.kind = _kind_of(rows[places[:LOOKED_AT].to(rows.device)], self.name)

    def _tokens(self, outputs: Tensor, keep: Tensor | None) -> Answers:
        per_input, classes = outputs.shape[1:]
        scores = outputs.detach().flatten(0, 1)
        tokens = torch.arange(len(scores), device=scores.device)
        if keep is not None:
            tokens = tokens[(keep.reshape(-1) != 0).to(scores.device)]
        predicted, ties = [torch.zeros(0, dtype=torch.long, device=scores.device)], 0
        for some in tokens.split(max(1, TOKEN_SLICE // classes)):
            part = scores[some]
            if bad := int((~torch.isfinite(part)).sum()):
                raise ValueError(
                    f"{self.name}: {bad} logits of tokens are NaN or infinite, in input {int(some[0]) // per_input} or "
                    "later ones; sosie.diff says where"
                )
            if self.kind == "probabilities":
                self._check_probabilities(part.double())
            first, equal = _largest(part)
            predicted.append(first)
            ties += equal
        return Answers(self.kind, classes, torch.cat(predicted), scores, ties=ties, tokens=tokens, per_input=per_input)

    def _check_probabilities(self, scores: Tensor) -> None:
        """Raise unless the rows sum to 1."""
        sums = scores.sum(1)
        wrong = (scores < 0).any(1) | ((sums - 1).abs() > SUMS_TO_ONE)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            hint = "; earlier rows looked like probabilities: set kind='logits' if they are not"
            raise ValueError(
                f"{self.name}: {int(wrong.sum())} of {len(scores)} rows are not probabilities: one sums to "
                f"{float(sums[row].detach()):.6g} with smallest entry {float(scores[row].min().detach()):.3g}"
                f"{'' if self._given else hint}"
            )

    def check_guess(self) -> None:
        """After the last batch: ask if outputs of small batches were taken for logits, but all lie between 0 and 1."""
        if self.small is not None and self.small >= NO_CHANCE:
            raise ValueError(_ASK.format(self.name))

    def _answers(self, outputs: Tensor) -> Answers:
        shape = tuple(outputs.shape)
        if self.kind == "labels":
            return Answers("labels", 1, check_labels(outputs, f"{self.name}: predicted labels"))
        if self.kind == "regression":
            values = outputs.double()[:, None] if outputs.ndim == 1 else outputs.double()
            if values.ndim != 2 or not values.shape[1]:
                raise ValueError(f"{self.name}: numbers to compare are (n,) or (n, d), got shape {shape}")
            return Answers("regression", values.shape[1], values=values)
        if outputs.ndim != 2 or shape[1] < 2:
            raise ValueError(f"{self.name}: {self.kind} are (n, classes) with at least 2 classes, got shape {shape}")
        scores = outputs.double()
        if self.kind == "probabilities":
            self._check_probabilities(scores)
        predicted, ties = _largest(scores)
        return Answers(self.kind, shape[1], predicted, scores, ties=ties)


def check_labels(labels: Tensor, name: str, classes: int | None = None) -> Tensor:
    """Return class numbers (n,) as integers, from 0 and below `classes` if that is known."""
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


def _largest(scores: Tensor) -> tuple[Tensor, int]:
    """The class with the largest score, the first of several, and the number of inputs with several."""
    if for_numpy(scores):  # waking torch's threads takes longer
        array = scores.numpy()
        first = array.argmax(1)
        equal = array == np.take_along_axis(array, first[:, None], 1)
        ties = 0 if np.count_nonzero(equal) == len(array) else np.count_nonzero(equal.sum(1) > 1)
        return torch.from_numpy(first), int(ties)
    tied = (scores == scores.amax(1, keepdim=True)).sum(1) > 1
    return scores.argmax(1), int(tied.sum())


def _kind_of(outputs: Tensor, name: str) -> str:
    """The kind of outputs by their look; an error asks where two kinds look alike."""
    shape = tuple(outputs.shape)
    if outputs.ndim not in (1, 2):
        raise ValueError(
            f"{name}: need (n,) labels, (n, classes) logits or probabilities, or (n, d) numbers, got outputs of shape "
            f"{shape}: wrap the model in a module that returns one answer per input"
            + (", or set kind='logits' if these are (inputs, tokens, vocabulary)" if len(shape) == 3 else "")
        )
    if not outputs.is_floating_point():
        if outputs.ndim == 1:
            return "labels"
        raise ValueError(f"{name}: whole numbers of shape {shape} may be counts, one-hot labels or scores: set kind=")
    if outputs.ndim == 1:
        if len(outputs) and bool((outputs == outputs.round()).all()):
            raise ValueError(
                f"{name}: floating-point outputs that are all whole may be labels or numbers: "
                "set kind='labels' or kind='regression'"
            )
        return "regression"
    if shape[1] == 1:
        raise ValueError(
            f"{name}: one output per input (shape {shape}) may be a number or the logit of one of two classes: set "
            "kind='regression', or give labels (n,) or both classes (n, 2)"
        )
    if bool((outputs >= 0).all()) and bool(((outputs.double().sum(1) - 1).abs() <= SUMS_TO_ONE).all()):
        return "probabilities"
    if outputs.numel() >= NO_CHANCE and _between_0_and_1(outputs):
        raise ValueError(_ASK.format(name))
    return "logits"


_ASK = (
    "{}: outputs between 0 and 1 whose rows do not sum to 1 may be logits, or probabilities of labels "
    "that do not exclude each other: set kind='logits', or kind='regression' to compare the numbers"
)


def _between_0_and_1(outputs: Tensor) -> bool:
    return not outputs.numel() or bool(outputs.amin() >= 0 and outputs.amax() <= 1)  # most logits are decided by one


@dataclass(frozen=True)
class ValueSums:
    """Second moments of d outputs by group, about the means of each group, so that a large mean costs no digits."""

    mean_x: Tensor  # (G, d)
    mean_y: Tensor
    xx: Tensor  # (G, d) Σ (x − mean)²
    yy: Tensor
    xy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, groups: Tensor, n: Tensor) -> ValueSums:
        mean_x, mean_y = (_shares(by_group(side, groups), n) for side in (x, y))
        dx, dy = x - mean_x[groups], y - mean_y[groups]
        return cls(mean_x, mean_y, *(by_group(a * b, groups) for a, b in ((dx, dx), (dy, dy), (dx, dy))))

    def merge(self, other: ValueSums, n: Tensor, m: Tensor) -> ValueSums:
        """The moments of all inputs of both; n and m count the inputs of each group."""
        share = _shares(m[:, None].expand_as(self.mean_x), n + m)
        dx, dy, weight = other.mean_x - self.mean_x, other.mean_y - self.mean_y, n[:, None] * share
        return ValueSums(
            self.mean_x + share * dx,
            self.mean_y + share * dy,
            self.xx + other.xx + weight * dx * dx,
            self.yy + other.yy + weight * dy * dy,
            self.xy + other.xy + weight * dx * dy,
        )

    def total(self, n: Tensor, jackknife: bool) -> dict[str, Tensor]:
        """The moments of all groups together, or of all but each, about the means of the inputs that are left."""
        weights = n[:, None]
        dx, dy = (mean - (weights * mean).sum(0) / n.sum() for mean in (self.mean_x, self.mean_y))
        left = over_groups(n, jackknife)[..., None]

        def about_means(within: Tensor, a: Tensor, b: Tensor) -> Tensor:
            offsets = over_groups(weights * a, jackknife) * over_groups(weights * b, jackknife)
            return over_groups(within + weights * a * b, jackknife) - offsets / left

        sides = {"xx": (dx, dx), "yy": (dy, dy), "xy": (dx, dy)}
        return {name: about_means(getattr(self, name), *side) for name, side in sides.items()}


@dataclass(frozen=True)
class OutputSums:
    """Sums over the outputs of two models for the same inputs; `merge` adds other inputs."""

    kinds: tuple[str, str]
    widths: tuple[int, int]
    sums: dict[str, Tensor]  # (G,) each, by their names in views: n, equal, right_a …
    predicted: tuple[Tensor, Tensor] | None  # (classes,) how often each model predicts each class
    values: ValueSums | None
    ties: tuple[int, int]
    inputs: int  # as many as `n` unless these are predictions for tokens

    @classmethod
    def of(
        cls, x: Tensor, y: Tensor, *, labels: Tensor | None = None, kind: str = "auto", start: int = 0
    ) -> OutputSums:
        """From outputs x and y for the same inputs; `start` is the index of the first in the whole data."""
        return cls.join(Reader("x", kind).read(x), Reader("y", kind).read(y), labels, start=start)

    @classmethod
    def join(
        cls,
        a: Answers,
        b: Answers,
        labels: Tensor | None = None,
        *,
        start: int = 0,
        only: type[Outputs] | None = None,
    ) -> OutputSums:
        """The sums of one chunk, from the outputs of both models; `only` one view needs them, None for all."""
        _check_pair(a, b)
        if a.values is not None and b.values is not None:
            groups, n = _groups(a.values, start)
            squared = (a.values - b.values).square().mean(1)
            values = None if only is Differences else ValueSums.of(a.values, b.values, groups, n)
            sums = {"n": n, "squared": by_group(squared, groups)}
            return cls((a.kind, b.kind), (a.width, b.width), sums, None, values, (0, 0), len(a))
        inputs = len(a) if a.tokens is None or a.scores is None else len(a.scores) // a.per_input
        if a.tokens is not None and labels is not None:
            if labels.numel() != inputs * a.per_input:
                raise ValueError(
                    f"need a label for each of {inputs} x {a.per_input} tokens, got labels of shape "
                    f"{tuple(labels.shape)}; {IGNORED} stands for none"
                )
            b, _ = b.labelled(labels)
            a, labels = a.labelled(labels)
        assert a.predicted is not None
        assert b.predicted is not None
        groups, n = _groups(a.predicted, start, a.tokens, a.per_input)
        matches = {"equal": a.predicted == b.predicted}
        if labels is not None:
            labels = check_labels(labels, "labels", _classes(a, b)).to(groups.device)
            if len(labels) != len(a):
                raise ValueError(f"need a label for each input, got {len(labels)} labels and {len(a)} outputs")
            right_a, right_b = a.predicted == labels, b.predicted == labels
            matches |= {"right_a": right_a, "right_b": right_b, "both_right": right_a & right_b}
        sums = {"n": n} | {name: by_group(match.double(), groups) for name, match in matches.items()}
        if only in (None, Distributions) and a.scores is not None and b.scores is not None:
            slices = zip(a.log_p_by_slice(), b.log_p_by_slice(), strict=True)
            divergences = [jensen_shannon_bits(p, q) for p, q in slices]
            sums["divergence"] = by_group(torch.cat([a.scores.new_zeros(0).double(), *divergences]), groups)
        classes = _classes(a, b) or 0
        predicted = torch.bincount(a.predicted, minlength=classes), torch.bincount(b.predicted, minlength=classes)
        return cls((a.kind, b.kind), (a.width, b.width), sums, _as_long(*predicted), None, (a.ties, b.ties), inputs)

    @property
    def n(self) -> int:
        return int(self.sums["n"].sum())

    @property
    def groups(self) -> Tensor:
        """(G,) bool: the groups that hold inputs."""
        return self.sums["n"] > 0

    @property
    def supplies(self) -> frozenset[type[Outputs]]:
        known = {*self.sums, *({"xx", "yy", "xy"} if self.values is not None else ())}
        views = (Outputs, Predictions, MarkedPredictions, Distributions, Differences, Continuous)
        return frozenset(view for view in views if {field.name for field in fields(view)} <= known)

    def describe(self) -> str:
        kinds = " and ".join(dict.fromkeys(self.kinds))
        of_tokens = f" for tokens of {self.inputs} inputs" if self.inputs != self.n else ""
        return f"counts over all {self.n} outputs{of_tokens} ({'numbers' if kinds == 'regression' else kinds})"

    def view(self, kind: type[Outputs], *, jackknife: bool = False) -> Outputs:
        """Sums over all inputs or, with `jackknife`, a first dimension of sums over all but each group of inputs."""
        if kind not in self.supplies:
            raise ValueError(self.why_not(kind))
        sums = {name: over_groups(groups, jackknife) for name, groups in self.sums.items()}
        if self.values is not None:
            sums |= self.values.total(self.sums["n"], jackknife)
        return kind(**{field.name: sums[field.name] for field in fields(kind)})

    def why_not(self, kind: type[Outputs]) -> str:
        """The reason why there is no such view."""
        got = " and ".join(dict.fromkeys(self.kinds))
        if issubclass(kind, Differences):
            return f"it compares numbers, and these outputs are {got}; kind='regression' reads them as numbers"
        if "regression" in self.kinds:
            return (
                "it compares classes, and these outputs are numbers (regression): output_rmse and output_correlation "
                "compare those; kind='logits' or 'labels' reads them as classes"
            )
        if issubclass(kind, Distributions):
            return f"it compares distributions over classes, so it needs logits or probabilities of both, got {got}"
        return "it needs labels: labels= (n,), or data that yield (x, y) with whole numbers y"

    def merge(self, other: OutputSums) -> OutputSums:
        if (self.kinds, self.widths, set(self.sums)) != (other.kinds, other.widths, set(other.sums)):
            raise ValueError(
                f"these sums are of other outputs: {self.kinds} of widths {self.widths} with {', '.join(self.sums)}, "
                f"and {other.kinds} of widths {other.widths} with {', '.join(other.sums)}"
            )
        predicted, values = None, None
        if self.predicted is not None and other.predicted is not None:
            sides = zip(self.predicted, other.predicted, strict=True)
            a, b = (torch.stack(_as_long(*counts)).sum(0) for counts in sides)
            predicted = _as_long(a, b)
        if self.values is not None and other.values is not None:
            values = self.values.merge(other.values, self.sums["n"], other.sums["n"])
        return OutputSums(
            self.kinds,
            self.widths,
            {name: groups + other.sums[name] for name, groups in self.sums.items()},
            predicted,
            values,
            (self.ties[0] + other.ties[0], self.ties[1] + other.ties[1]),
            self.inputs + other.inputs,
        )


def jensen_shannon_bits(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(n,): Jensen-Shannon divergence of each pair of rows of log-probabilities, in bits."""
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return (_relative_entropy(log_p, middle) + _relative_entropy(log_q, middle)) / (2 * math.log(2))


def _relative_entropy(log_p: Tensor, log_m: Tensor) -> Tensor:
    possible = log_p > -torch.inf  # a class of probability 0 adds nothing
    safe_p, safe_m = (torch.where(possible, side, torch.zeros_like(side)) for side in (log_p, log_m))
    return torch.where(possible, safe_p.exp() * (safe_p - safe_m), torch.zeros_like(safe_p)).sum(1)


def _check_pair(a: Answers, b: Answers) -> None:
    if (a.tokens is None) != (b.tokens is None):
        raise ValueError("one side has an output for each token, the other for each input")
    same = (len(a), a.per_input) == (len(b), b.per_input)
    if a.tokens is not None and b.tokens is not None and not (same and torch.equal(a.tokens, b.tokens)):
        raise ValueError(
            f"need outputs of the same tokens, got {len(a)} and {len(b)} without padding, at most {a.per_input} and "
            f"{b.per_input} of an input"
        )
    if len(a) != len(b):
        raise ValueError(f"need outputs of the same inputs, got {len(a)} and {len(b)}")
    if (a.values is None) != (b.values is None):
        raise ValueError(f"one side's outputs are {a.kind}, the other's {b.kind}: set kind= if they are of one kind")
    if "labels" not in (a.kind, b.kind) and a.width != b.width:
        what = "numbers" if a.values is not None else "classes"
        raise ValueError(f"need the same {what} on both sides, got {a.width} and {b.width}")
    classes = _classes(a, b)
    for side in (a, b):
        if side.kind == "labels" and classes is not None and side.predicted is not None:
            check_labels(side.predicted, "predicted labels", classes)


def _classes(a: Answers, b: Answers) -> int | None:
    """The number of classes; None for labels alone, which do not show it."""
    return next((side.width for side in (a, b) if side.kind in ("logits", "probabilities")), None)


def _groups(rows: Tensor, start: int, tokens: Tensor | None = None, per_input: int = 1) -> tuple[Tensor, Tensor]:
    inputs = torch.arange(len(rows), device=rows.device) if tokens is None else tokens // per_input
    groups = dealt_groups(start + inputs, GROUPS)
    return groups, torch.bincount(groups, minlength=GROUPS).double()


def _shares(sums: Tensor, n: Tensor) -> Tensor:
    """Sums (G, d) over n (G,); 0 where a group is empty."""
    return sums / torch.where(n > 0, n, torch.ones_like(n))[:, None]


def _as_long(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Counts by class of equal length, with zeros for classes that only the other has."""
    longest = max(len(a), len(b))
    return pad(a, (0, longest - len(a))), pad(b, (0, longest - len(b)))
