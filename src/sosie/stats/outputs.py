"""OutputSums: counts and sums over the paired outputs of two models; memory does not grow with the inputs.

They are kept for groups of inputs, input i in group i modulo 32: leaving each out in turn gives the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from .answers import Answers, Reader, check_labels
from .grams import GROUPS
from .views import Continuous, Differences, Distributions, MarkedPredictions, Outputs, Predictions


@dataclass(frozen=True)
class ValueSums:
    """Second moments of d outputs, by group, about each group's own means: no digits are lost to a large mean."""

    mean_x: Tensor  # (G, d)
    mean_y: Tensor
    xx: Tensor  # (G, d) Σ (x − mean)²
    yy: Tensor
    xy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, groups: Tensor, n: Tensor) -> ValueSums:
        mean_x, mean_y = (_shares(_grouped(side, groups), n) for side in (x, y))
        dx, dy = x - mean_x[groups], y - mean_y[groups]
        return cls(mean_x, mean_y, *(_grouped(a * b, groups) for a, b in ((dx, dx), (dy, dy), (dx, dy))))

    def merge(self, other: ValueSums, n: Tensor, m: Tensor) -> ValueSums:
        """n and m are the inputs of each group on either side."""
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
        """The moments of all groups together, or of all but each, about the means of what is left."""
        weights = n[:, None]
        dx, dy = (mean - (weights * mean).sum(0) / n.sum() for mean in (self.mean_x, self.mean_y))
        left = _sum(n, jackknife)[..., None]
        offsets = [_sum(weights * d, jackknife) for d in (dx, dy)]
        found = {}
        for name, (a, b) in {"xx": (0, 0), "yy": (1, 1), "xy": (0, 1)}.items():
            about_all = _sum(getattr(self, name) + weights * (dx, dy)[a] * (dx, dy)[b], jackknife)
            found[name] = about_all - offsets[a] * offsets[b] / left
        return found


@dataclass(frozen=True)
class OutputSums:
    """Sums over the outputs of two models for the same inputs; `merge` joins two lots of inputs."""

    kinds: tuple[str, str]
    widths: tuple[int, int]
    sums: dict[str, Tensor]  # (G,) each, by the names that views give them: n, equal, right_a …
    predicted: tuple[Tensor, Tensor] | None  # (classes,) how often each model names each class
    values: ValueSums | None
    ties: tuple[int, int]

    @classmethod
    def of(
        cls, x: Tensor, y: Tensor, *, labels: Tensor | None = None, kind: str = "auto", start: int = 0
    ) -> OutputSums:
        """From outputs x and y of the same inputs; `start` is the index of the first in the whole data."""
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
        """The sums of one chunk, from what each model answered; `only`: the view that is wanted, None: all."""
        _check_pair(a, b)
        if a.values is not None and b.values is not None:
            groups, n = _groups(a.values, start)
            squared = (a.values - b.values).square().mean(1)
            values = None if only is Differences else ValueSums.of(a.values, b.values, groups, n)
            return cls(
                (a.kind, b.kind),
                (a.width, b.width),
                {"n": n, "squared": _grouped(squared, groups)},
                None,
                values,
                (0, 0),
            )
        assert a.predicted is not None
        assert b.predicted is not None
        groups, n = _groups(a.predicted, start)
        found = {"equal": a.predicted == b.predicted}
        if labels is not None:
            labels = check_labels(labels, "labels", _classes(a, b)).to(groups.device)
            if len(labels) != len(a):
                raise ValueError(f"need a label for each input, got {len(labels)} labels and {len(a)} outputs")
            right_a, right_b = a.predicted == labels, b.predicted == labels
            found |= {"right_a": right_a, "right_b": right_b, "both_right": right_a & right_b}
        sums = {"n": n} | {name: _grouped(each.double(), groups) for name, each in found.items()}
        if only in (None, Distributions) and a.log_p is not None and b.log_p is not None:
            sums["divergence"] = _grouped(jensen_shannon_bits(a.log_p, b.log_p), groups)
        classes = _classes(a, b) or 0
        predicted = torch.bincount(a.predicted, minlength=classes), torch.bincount(b.predicted, minlength=classes)
        return cls((a.kind, b.kind), (a.width, b.width), sums, _as_long(*predicted), None, (a.ties, b.ties))

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
        return f"counts over all {self.n} outputs ({'numbers' if kinds == 'regression' else kinds})"

    def view(self, kind: type[Outputs], *, jackknife: bool = False) -> Outputs:
        """Sums over all inputs; with `jackknife` a dimension in front: over all but each group of inputs."""
        if kind not in self.supplies:
            raise ValueError(self.why_not(kind))
        found = {name: _sum(each, jackknife) for name, each in self.sums.items()}
        if self.values is not None:
            found |= self.values.total(self.sums["n"], jackknife)
        return kind(**{field.name: found[field.name] for field in fields(kind)})

    def why_not(self, kind: type[Outputs]) -> str:
        """Why a view cannot be had, in words."""
        got = " and ".join(dict.fromkeys(self.kinds))
        if issubclass(kind, Differences):
            return f"it compares numbers, and these outputs are {got}; kind='regression' takes them as numbers"
        if "regression" in self.kinds:
            return (
                "it compares classes, and these outputs are numbers (regression): output_rmse and output_correlation "
                "compare those; kind='logits' or 'labels' takes them as classes"
            )
        if issubclass(kind, Distributions):
            return f"it compares distributions over classes, so needs logits or probabilities of both, got {got}"
        return "it needs labels: labels= (n,), or data that yield (x, y) with whole numbers y"

    def merge(self, other: OutputSums) -> OutputSums:
        if (self.kinds, self.widths, set(self.sums)) != (other.kinds, other.widths, set(other.sums)):
            raise ValueError(
                f"these sums are of other outputs: {self.kinds} of widths {self.widths} with {', '.join(self.sums)}, "
                f"and {other.kinds} of widths {other.widths} with {', '.join(other.sums)}"
            )
        predicted, values = None, None
        if self.predicted is not None and other.predicted is not None:
            a, b = (sum(_as_long(*both)) for both in zip(self.predicted, other.predicted, strict=True))
            predicted = _as_long(torch.as_tensor(a), torch.as_tensor(b))
        if self.values is not None and other.values is not None:
            values = self.values.merge(other.values, self.sums["n"], other.sums["n"])
        return OutputSums(
            self.kinds,
            self.widths,
            {name: each + other.sums[name] for name, each in self.sums.items()},
            predicted,
            values,
            (self.ties[0] + other.ties[0], self.ties[1] + other.ties[1]),
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
    if len(a) != len(b):
        raise ValueError(f"need outputs of the same inputs, got {len(a)} and {len(b)}")
    if (a.values is None) != (b.values is None):
        raise ValueError(f"one side's outputs are {a.kind}, the other's {b.kind}: say kind= if they are of one kind")
    if "labels" not in (a.kind, b.kind) and a.width != b.width:
        what = "numbers" if a.values is not None else "classes"
        raise ValueError(f"need the same {what} on both sides, got {a.width} and {b.width}")
    classes = _classes(a, b)
    for side in (a, b):
        if side.kind == "labels" and classes is not None and side.predicted is not None:
            check_labels(side.predicted, "predicted labels", classes)


def _classes(a: Answers, b: Answers) -> int | None:
    """How many classes there are; labels alone do not tell."""
    return next((side.width for side in (a, b) if side.kind in ("logits", "probabilities")), None)


def _groups(rows: Tensor, start: int) -> tuple[Tensor, Tensor]:
    groups = torch.arange(start, start + len(rows), device=rows.device) % GROUPS
    return groups, torch.bincount(groups, minlength=GROUPS).double()


def _grouped(rows: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros(GROUPS, *rows.shape[1:], dtype=rows.dtype, device=rows.device).index_add(0, groups, rows)


def _sum(grouped: Tensor, jackknife: bool) -> Tensor:
    return grouped.sum(0) - grouped if jackknife else grouped.sum(0)


def _shares(sums: Tensor, n: Tensor) -> Tensor:
    """Sums (G, d) over n (G,); 0 where a group is empty."""
    return sums / torch.where(n > 0, n, torch.ones_like(n))[:, None]


def _as_long(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Counts by class, with zeros for classes that only the other has seen."""
    longest = max(len(a), len(b))
    return pad(a, (0, longest - len(a))), pad(b, (0, longest - len(b)))
