"""What two models answer: the KL divergence of their predictions, first choices, and what the right answer gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture.sites import ANSWERS, at_path, path_to_tensor
from ..engine.uncertainty import CONFIDENCE, FEWEST_GROUPS, by_jackknife, of_clustered_share
from ..results.diff import OutputDiff, Place
from ..stats import IGNORED
from ..stats.grams import GROUPS, by_group, over_groups
from ..stats.sampling import dealt_groups

SLICE = {"cpu": 2**17, "cuda": 2**24}  # logits of each model that are held in float32 at a time
NEAR = 2**-5  # logits that differ by no more, but for a shift of all, have a KL divergence by its series
FAR = 50.0  # log-probabilities that differ by more are reduced in float64
BLOCK = 128  # logits of which the largest is found first
PER_OCTAVE = 32  # bins of the histogram of KL divergences: a quantile is within 1.1 % of the exact one
LEAST, MOST = -60, 20  # log₂ of the divergences that bins tell apart; below 2⁻⁶⁰ they count as 0


def logits_in(output: Any, ids: Tensor | None) -> Tensor | None:
    """The logits among what a model returns, (inputs, classes) or (inputs, tokens, vocabulary); None if there are none.

    A tensor (inputs, tokens, n) that is not called logits may be hidden states: it counts as logits if every token of
    the input has a number in it.
    """
    path = path_to_tensor(output, ANSWERS)
    if path is None or "last_hidden_state" in path:
        return None
    tensor = at_path(output, path)
    dense = tensor.is_floating_point() and tensor.layout == torch.strided
    if not dense or tensor.ndim not in (2, 3) or tensor.shape[-1] < 2 or not len(tensor):
        return None
    if tensor.ndim == 2 or "logits" in path:
        return tensor
    if ids is None or ids.shape != tensor.shape[:2]:
        return None
    return tensor if int(ids.max()) < tensor.shape[-1] else None


@dataclass
class AnswerSums:
    """Sums over the predictions of two models for the same inputs, fed chunk by chunk, in order.

    Predictions are (inputs, classes), or (inputs, tokens, vocabulary), where each token that is kept is one. Logits
    stay as they are, on their device: float32 copies are made of `SLICE` numbers at a time.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)  # (G,) float64 each, by groups of inputs
    histogram: Tensor = field(default_factory=lambda: torch.zeros((MOST - LEAST) * PER_OCTAVE + 2, dtype=torch.int64))
    furthest: dict[str, tuple[float, Place]] = field(default_factory=dict)  # the largest value of each kind
    broken: dict[str, tuple[int, Place]] = field(default_factory=dict)  # predictions with NaN: how many, the first
    inputs: int = 0  # with predictions

    def add(
        self,
        logits_a: Tensor,
        logits_b: Tensor,
        keep: Tensor | None = None,
        labels: Tensor | None = None,
        first_input: int = 0,
    ) -> None:
        """Add the predictions of a chunk of inputs, of one shape.

        `keep`: (inputs, tokens), 0 at padding, as the mask of the model's arguments; None keeps all. `labels`: the
        right answers, (inputs,) classes or (inputs, tokens) tokens, each of the prediction at its place (`next_tokens`
        shifts the input of a causal model), `IGNORED` where there is none. `first_input`: the number of the chunk's
        first input in the data.
        """
        a, b = logits_a.flatten(0, -2), logits_b.flatten(0, -2)
        inputs, classes = len(logits_a), a.shape[1]
        tokens = len(a) // inputs
        index = None if keep is None else (keep.reshape(-1) != 0).nonzero()[:, 0].cpu()
        self.inputs += inputs if index is None else len(torch.div(index, tokens, rounding_mode="floor").unique())
        right = None if labels is None else labels.cpu().long().reshape(-1)
        count = len(a) if index is None else len(index)
        step = max(1, SLICE.get(a.device.type, SLICE["cpu"]) // classes)
        parts = []
        for start in range(0, count, step):
            stop = min(start + step, count)
            if index is None:
                some = [side[start:stop] for side in (a, b, right) if side is not None]
            else:  # index_select takes a quarter of the time of an index in brackets
                rows = index[start:stop]
                some = [side.index_select(0, rows.to(side.device)) for side in (a, b, right) if side is not None]
            parts.append(_by_prediction(some[0], some[1], some[2] if right is not None else None))
        if parts:
            numbers = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
            of_tokens = tokens if logits_a.ndim == 3 else None
            self._add_up(numbers, torch.arange(count) if index is None else index, of_tokens, first_input)

    def _add_up(self, numbers: dict[str, Tensor], index: Tensor, tokens: int | None, first: int) -> None:
        """Add the numbers of predictions, which have these places among all."""
        inputs = first + torch.div(index, tokens or 1, rounding_mode="floor")

        def place(k: Tensor) -> Place:
            return Place(int(inputs[k]), () if tokens is None else (int(index[k]) % tokens,))

        whole_a, whole_b = numbers.pop("whole_a"), numbers.pop("whole_b")
        for what, bad in (
            ("NaN in A alone", ~whole_a & whole_b),
            ("NaN in B alone", whole_a & ~whole_b),
            ("NaN in both", ~whole_a & ~whole_b),
        ):
            if count := int(bad.sum()):
                before, first_place = self.broken.get(what) or (0, place(bad.nonzero()[0, 0]))
                self.broken[what] = before + count, first_place
        kept = whole_a & whole_b
        groups, places = dealt_groups(inputs, GROUPS)[kept], kept.nonzero()[:, 0]
        here = {name: number[kept] for name, number in numbers.items()}
        here["n"] = torch.ones(len(groups), dtype=torch.float64)
        for name, number in here.items():
            self.sums[name] = self.sums.get(name, torch.zeros(GROUPS, dtype=torch.float64)) + by_group(number, groups)
        self.histogram += torch.bincount(_bins(here["kl"]), minlength=len(self.histogram))
        extremes = {"kl": here["kl"]}
        if "change" in here:
            extremes |= {"drop": -here["change"], "rise": here["change"]}
        for name, number in extremes.items():
            if len(number):
                k = number.argmax()
                if name not in self.furthest or float(number[k]) > self.furthest[name][0]:
                    self.furthest[name] = float(number[k]), place(places[k])

    @property
    def n(self) -> int:
        """The predictions that were compared."""
        return int(self.sums["n"].sum()) if self.sums else 0

    def quantile(self, share: float) -> float:
        """The KL divergence that this share of the predictions does not exceed, to the width of a bin."""
        rank = max(1, math.ceil(share * int(self.histogram.sum())))
        place = int(torch.searchsorted(self.histogram.cumsum(0), rank))
        if not place:
            return 0.0
        largest = self.furthest["kl"][0]
        return min(2 ** (LEAST + (place - 0.5) / PER_OCTAVE), largest) if place < len(self.histogram) - 1 else largest

    def result(self) -> tuple[OutputDiff, ...]:
        """One row for each number; none without predictions. Intervals (95 %) leave out groups of inputs in turn."""
        rows = [
            OutputDiff("undefined", count, at=place, meaning=f"predictions with {what}, which are left out")
            for what, (count, place) in self.broken.items()
        ]
        if not self.n:
            return tuple(rows)
        n = self.sums["n"]
        rows += [
            self._mean("kl_divergence", self.sums["kl"], n, (0, None), "KL(a‖b) in nats, mean over predictions"),
            OutputDiff("kl_median", self.quantile(0.5), meaning="half the predictions have at most this KL(a‖b)"),
            OutputDiff("kl_99", self.quantile(0.99), meaning="99 % of the predictions have at most this KL(a‖b)"),
            self._extreme("kl_largest", "kl", "the largest KL(a‖b) of a prediction"),
            self._agreement(),
        ]
        if "marked" in self.sums and (marked := self.sums["marked"]).any():
            more = self.sums["log_a"] - self.sums["log_b"]
            rows += [
                self._mean(
                    "probability_change", self.sums["change"], marked, (-1, 1), "of the right answer, b − a, mean"
                ),
                self._extreme("probability_drop", "drop", "by how much the right answer's probability falls at most"),
                self._extreme("probability_rise", "rise", "by how much the right answer's probability rises at most"),
                self._mean("perplexity_ratio", more, marked, (0, None), "the perplexity of b over that of a", np.exp),
            ]
        return tuple(rows)

    def _extreme(self, measure: str, kind: str, meaning: str) -> OutputDiff:
        value, place = self.furthest[kind]  # of equal predictions rounding may leave less than 0, or -0.0
        return OutputDiff(measure, max(value, 0.0) + 0.0, at=place, meaning=meaning)

    def _agreement(self) -> OutputDiff:
        """The share of predictions with the same first choice, with an exact interval for what they are worth."""
        equal, n = self.sums["equal"], self.sums["n"]
        value = float(equal.sum() / n.sum())
        without = (over_groups(equal, True) / over_groups(n, True))[n > 0].numpy()
        interval = of_clustered_share(value, self.n, self.inputs, without)
        return OutputDiff("agreement", value, *interval, meaning="share of predictions with the same first choice")

    def _mean(
        self,
        measure: str,
        total: Tensor,
        n: Tensor,
        bounds: tuple[float | None, float | None],
        meaning: str,
        of: Callable[[Any], Any] = np.asarray,
    ) -> OutputDiff:
        """A mean over predictions, or a function of it, with its interval by groups of inputs."""
        value = float(of((total.sum() / n.sum()).numpy()))
        groups = n > 0
        if int(groups.sum()) < FEWEST_GROUPS or not math.isfinite(value):
            return OutputDiff(measure, value, meaning=meaning)
        without = (over_groups(total, True) / over_groups(n, True))[groups].numpy()
        if not (without != without[0]).any():  # which shows no spread, not that there is none
            return OutputDiff(measure, value, meaning=meaning)
        below, above = (float(reach) for reach in by_jackknife(of(without)).reach(CONFIDENCE))
        low, high = value - below, value + above
        bottom, top = bounds
        low, high = low if bottom is None else max(low, bottom), high if top is None else min(high, top)
        return OutputDiff(measure, value, low, high, meaning=meaning)


def _by_prediction(x: Tensor, y: Tensor, right: Tensor | None) -> dict[str, Tensor]:
    """What two models predict for the same rows of logits, (n,) numbers each."""
    wide = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    x, y = x.to(wide), y.to(x.device, wide)
    (most_x, first_x), (most_y, first_y) = _largest(x), _largest(y)
    # −∞ forbids a class; NaN and +∞ leave no prediction.
    numbers = {"whole_a": most_x.isfinite(), "whole_b": most_y.isfinite()}
    numbers |= {"kl": divergence(x, y), "equal": (first_x == first_y).double()}
    if right is not None:
        marked = (right != IGNORED).to(x.device)
        column = right.clamp_min(0).to(x.device)[:, None]
        ours, theirs = (
            torch.where(marked, side.log_softmax(1).gather(1, column)[:, 0].double(), 0.0) for side in (x, y)
        )
        numbers |= {"marked": marked.double(), "change": theirs.exp() - ours.exp(), "log_a": ours, "log_b": theirs}
    return numbers


def _largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row and its place, as `x.max(1)`, in a third of the time on a CPU: first of blocks."""
    blocks = x[:, : x.shape[1] // BLOCK * BLOCK].unflatten(1, (-1, BLOCK))
    if x.device.type != "cpu" or not blocks.numel():
        most, place = x.max(1)
        return most, place
    most, block = blocks.amax(2).max(1)
    place = BLOCK * block + blocks[torch.arange(len(x)), block].argmax(1)
    if blocks.numel() < x.numel():
        rest, where = x[:, blocks[0].numel() :].max(1)
        place = torch.where(rest > most, blocks[0].numel() + where, place)
        most = torch.maximum(most, rest)
    return most, place


def divergence(x: Tensor, y: Tensor) -> Tensor:
    """(n,) float64: the KL divergence of each row of logits x from that of y, ∞ where y forbids what x allows.

    float32 suffices though p (log p − log q) nearly cancels, since no sum here has terms of both signs that matter.
    """
    if x.dtype == torch.float64:
        return _exact(x, y)
    apart = x - y
    reach = apart.amax(1) - apart.amin(1)  # NaN where −∞ forbids a class
    ways = {_by_series: reach <= NEAR, _by_terms: (reach > NEAR) & (reach <= FAR), _exact: ~(reach <= FAR)}
    result = torch.empty_like(reach, dtype=torch.float64)
    for way, rows in ways.items():
        if bool(rows.all()):
            return way(x, y)
        if bool(rows.any()):
            result[rows] = way(x[rows], y[rows])
    return result


def _by_series(x: Tensor, y: Tensor) -> Tensor:
    """log Σ p exp(−t), where t is x − y less its mean under p: how that mean is rounded shows in its square alone."""
    p, t = x.softmax(1), x - y
    t = t.sub_(torch.linalg.vecdot(p, t)[:, None])
    series = (t / 24).sub_(1 / 6).mul_(t).add_(1 / 2).mul_(t).mul_(t)  # exp(−t) − 1 + t
    return torch.log1p(torch.linalg.vecdot(p, series).double())


def _by_terms(x: Tensor, y: Tensor) -> Tensor:
    """Σ p (exp(u) − 1 − u) with u = log q − log p: every term is positive, and Σ p (exp(u) − 1) = Σ q − Σ p is 0."""
    log_p = x.log_softmax(1)
    u = y.log_softmax(1).sub_(log_p)
    return torch.linalg.vecdot(log_p.exp_(), torch.expm1(u).sub_(u)).double().clamp_min(0)


def _exact(x: Tensor, y: Tensor) -> Tensor:
    log_p, log_q = (side.double().log_softmax(1) for side in (x, y))
    return torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0).sum(1).clamp_min(0)


def _bins(divergences: Tensor) -> Tensor:
    """Bin 0 holds 0 and what is below all bins, the last what is above."""
    logs = torch.log2(divergences)
    place = torch.floor((logs - LEAST) * PER_OCTAVE).clamp(-1, (MOST - LEAST) * PER_OCTAVE)
    return (place + 1).long()
