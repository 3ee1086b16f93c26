"""Grounding: does a measure agree with how networks behave? Correlations with the share of images they agree on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from ..results import Closer
from .candidates import Candidate, CandidateValues, Clock, values_of
from .population import GROUPS, Agreement, Block, Population, Scale, last_hidden, pairs_of

# Correlations: intervals, and tests of the difference between two of them

Array = np.ndarray
LEVEL = 0.95
DRAWS_AT_ONCE = 256  # of the bootstrap: (draws, pairs) arrays are held


@dataclass(frozen=True)
class Correlation:
    """A coefficient over n pairs, with Fisher's interval and p-value, which assume independent pairs."""

    value: float
    low: float
    high: float
    p: float
    n: int


def pearson(x: Array, y: Array) -> Correlation:
    """Pearson's r with the interval and the two-sided p of Fisher's z: atanh(r) with standard error 1/√(n − 3)."""
    x, y = _checked(x, y)
    r, n = float(weighted_pearson(x, y, np.ones((1, len(x))))[0]), len(x)
    if abs(r) == 1:
        return Correlation(r, r, r, 0.0, n)
    z, error = math.atanh(r), 1 / math.sqrt(n - 3)
    reach = float(stats.norm.ppf((1 + LEVEL) / 2)) * error
    return Correlation(r, math.tanh(z - reach), math.tanh(z + reach), 2 * float(stats.norm.sf(abs(z) / error)), n)


def spearman(x: Array, y: Array) -> Correlation:
    """Spearman's ρ, ties at their mean rank; with Fisher's z as for r, as is customary, which is a little narrow."""
    x, y = _checked(x, y)
    return pearson(stats.rankdata(x), stats.rankdata(y))


def bootstrap(
    x: Array, y: Array, units: tuple[Array, Array], *, ranks: bool, draws: int = 1000, seed: int = 0
) -> Array:
    """The coefficient in each draw of a bootstrap over units (training runs), since pairs share them.

    `units` are the numbers of the two units that each pair is made of. A pair counts as often as both of its units
    were drawn, in a product (Snijders and Borgatti 1999); a pair within one unit as often as that one. The same seed
    and units give the same draws, so that two measures can be compared draw by draw. A draw in which nothing varies is
    NaN.
    """
    x, y = _checked(x, y)
    a, b = (np.asarray(side) for side in units)
    _, numbers = np.unique(np.concatenate([a, b]), return_inverse=True)
    a, b, count = numbers[: len(a)], numbers[len(a) :], int(numbers.max()) + 1
    random = np.random.default_rng(seed)
    coefficients = []
    for start in range(0, draws, DRAWS_AT_ONCE):
        size = min(DRAWS_AT_ONCE, draws - start)
        drawn = random.multinomial(count, np.full(count, 1 / count), size=size)
        weights = np.where(a == b, drawn[:, a], drawn[:, a] * drawn[:, b]).astype(np.float64)
        coefficients.append(weighted_spearman(x, y, weights) if ranks else weighted_pearson(x, y, weights))
    return np.concatenate(coefficients)


def percentile_interval(draws: Array) -> list[float] | None:
    """[low, high] of the middle 95 % of draws; None where more than a tenth of them were undefined."""
    defined = draws[np.isfinite(draws)]
    if len(defined) < 0.9 * len(draws):
        return None
    return np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()


def weighted_pearson(x: Array, y: Array, weights: Array) -> Array:
    """r of pairs that count `weights` (draws, pairs) times; NaN where one side does not vary."""
    x, y = (np.broadcast_to(v, weights.shape) for v in (x, y))
    total = weights.sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        dx, dy = (v - (weights * v).sum(1, keepdims=True) / total for v in (x, y))
        xx, yy, xy = ((weights * one * other).sum(1) for one, other in ((dx, dx), (dy, dy), (dx, dy)))
        # A side that is constant in this draw does not vary, though rounding leaves something.
        rounding = [1e-24 * (weights * v * v).sum(1) for v in (x, y)]
        r = np.clip(xy / np.sqrt(xx * yy), -1, 1)  # Cauchy and Schwarz: beyond is rounding
        return np.where((xx > rounding[0]) & (yy > rounding[1]), r, np.nan)


def weighted_spearman(x: Array, y: Array, weights: Array) -> Array:
    """ρ of pairs that count `weights` times: what ranks of the repeated pairs would give."""
    return weighted_pearson(_weighted_ranks(x, weights), _weighted_ranks(y, weights), weights)


def _weighted_ranks(x: Array, weights: Array) -> Array:
    """Mean ranks (draws, pairs) among values each of which counts `weights` times."""
    values, group = np.unique(x, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(values)))
    of_group = np.add.reduceat(weights[:, order], starts, axis=1)
    before = np.cumsum(of_group, axis=1) - of_group
    return (before + (of_group + 1) / 2)[:, group]


def meng(first: float, second: float, between: float, n: int) -> tuple[float, float]:
    """Z of Meng, Rosenthal and Rubin (1992, eq. 1) for correlations of two variables with a third, and its p.

    `between` is the correlation of the two variables, all of one sample. The test rests on Fisher's z, as the intervals
    do, and its two-sided p is what the leaderboard quotes. It assumes independent pairs; the bootstrap over models
    shows the effect of sharing them.
    """
    if n < 4:
        raise ValueError(f"comparing two correlations needs at least 4 pairs, got {n}")
    if not all(abs(r) < 1 for r in (first, second, between)):
        raise ValueError(f"no test for perfect correlations: got {first}, {second} and {between} between them")
    if 1 - first**2 - second**2 - between**2 + 2 * first * second * between < -1e-9:
        raise ValueError(f"no three variables correlate by {first}, {second} and {between}: check the signs")
    mean_square = (first**2 + second**2) / 2
    f = min((1 - between) / (2 * (1 - mean_square)), 1.0)  # the paper's own ceiling
    h = (1 - f * mean_square) / (1 - mean_square)
    z = (math.atanh(first) - math.atanh(second)) * math.sqrt((n - 3) / (2 * (1 - between) * h))
    return z, 2 * float(stats.norm.sf(abs(z)))


def _checked(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = (np.asarray(v, dtype=np.float64) for v in (x, y))
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"a correlation needs two lists of equal length, got shapes {x.shape} and {y.shape}")
    if len(x) < 4:
        raise ValueError(f"a correlation with an interval needs at least 4 pairs, got {len(x)}")
    for side, v in (("first", x), ("second", y)):
        if not np.isfinite(v).all():
            raise ValueError(f"the {side} variable has {int((~np.isfinite(v)).sum())} values that are not finite")
        if np.ptp(v) <= 1e-12 * np.abs(v).max():
            raise ValueError(f"the {side} variable is {v[0]:.4g} for all {len(v)} pairs: no correlation is defined")
    return x, y


TOGETHER = 32  # networks whose activations are compared in one go
COEFFICIENTS = {"pearson": pearson, "spearman": spearman}


class Undefined(ValueError):
    """The measure has no value for any pair of a kind, by its definition: this is not a failure."""


class Ground:
    """The pairs of networks, their activations at the last hidden layer for clean images, and how far they agree."""

    def __init__(
        self, scale: Scale, population: Population, agreement: Agreement, images: Tensor, *, seed: int
    ) -> None:
        self.scale, self.population, self.agreement, self.seed = scale, population, agreement, seed
        self.inputs = images.flatten(1).double()
        self.activations = [last_hidden(model, images) for model in population.models]

    def pairs(self, kind: str) -> np.ndarray:
        """(pairs, 2) numbers of networks."""
        return np.array([pair for block in self.population.blocks[kind] for pair in pairs_of(block)]).reshape(-1, 2)

    def values(self, candidate: Candidate, kind: str) -> CandidateValues:
        """The values of all pairs, by blocks in a seeded order: if the budget runs out, a fair share is done."""
        blocks, clock = self.population.blocks[kind], Clock(self.scale.budget)
        ends = np.cumsum([len(pairs_of(block)) for block in blocks])
        values = np.full(len(self.pairs(kind)), np.nan)
        reasons: Counter[str] = Counter()
        for lot in _lots(np.random.default_rng(self.seed).permutation(len(blocks)).tolist(), blocks):
            members = [member for k in lot for member in blocks[k]]
            place = {member: number for number, member in enumerate(members)}
            pairs = [(place[a], place[b]) for k in lot for a, b in pairs_of(blocks[k])]
            things: Any = [self.population.models[m] for m in members]
            if candidate.of == "activations":
                things = [self.activations[m][: candidate.rows] for m in members]
            own = values_of(candidate, things, pairs, inputs=self.inputs[: candidate.rows], clock=clock)
            values[np.concatenate([np.arange(ends[k] - len(pairs_of(blocks[k])), ends[k]) for k in lot])] = own.values
            reasons += own.reasons
        return CandidateValues(values, reasons)

    def runs(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """The training runs of the two networks of each pair: the bootstrap draws them."""
        runs, pairs = np.array(self.population.runs), self.pairs(kind)
        return runs[pairs[:, 0]], runs[pairs[:, 1]]

    def agreed(self, kind: str, condition: str) -> np.ndarray:
        """The share of images that the networks of each pair agree on."""
        pairs = self.pairs(kind)
        return self.agreement[condition][pairs[:, 0], pairs[:, 1]]


def _lots(order: Sequence[int], blocks: Sequence[Block]) -> Iterator[list[int]]:
    """Blocks in this order, in lots of at most `TOGETHER` networks, which bounds the memory."""
    lot: list[int] = []
    for k in order:
        if lot and sum(len(blocks[one]) for one in lot) + len(blocks[k]) > TOGETHER:
            yield lot
            lot = []
        lot.append(k)
    if lot:
        yield lot


def ground(candidate: Candidate, closer: Closer, at: Ground, kind: str) -> dict[str, Any]:
    """Correlations over the pairs of one kind: with intervals for groups of conditions, plain for each alone."""
    every = at.values(candidate, kind)
    kept = every.defined
    if not kept.any():
        why = every.reasons.most_common(1)[0][0] if every.reasons else "there are no pairs"
        if Clock(at.scale.budget).reason in every.reasons:
            raise ValueError(f"no pair of networks that differ in {kind} has a value: {why}")
        raise Undefined(f"not defined for networks that differ in {kind}: {why}")
    oriented = every.values[kept] * (1 if closer == "up" else -1)
    units_a, units_b = (side[kept] for side in at.runs(kind))
    agreed = {name: at.agreed(kind, name)[kept] for name in at.agreement}
    groups = {n: _correlations(oriented, agreed[n], (units_a, units_b), at) for n in GROUPS if n in agreed}
    alone = {name: _plain(oriented, y) for name, y in agreed.items() if name not in GROUPS}
    return {
        "values": every.values,
        "pairs": len(kept),
        "defined": int(kept.sum()),
        "undefined": dict(every.reasons.most_common(3)),
        "groups": groups,
        "conditions": alone,
    }


def _correlations(x: np.ndarray, y: np.ndarray, units: tuple[np.ndarray, np.ndarray], at: Ground) -> dict[str, Any]:
    correlations: dict[str, Any] = {}
    try:
        for name, coefficient in COEFFICIENTS.items():
            draws = bootstrap(x, y, units, ranks=name == "spearman", draws=at.scale.draws, seed=at.seed)
            correlations[name] = asdict(coefficient(x, y)) | {"over_models": percentile_interval(draws)}
    except ValueError as error:
        return {"why": str(error)}
    return correlations


def _plain(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    try:
        return {name: coefficient(x, y).value for name, coefficient in COEFFICIENTS.items()}
    except ValueError as error:
        return {"why": str(error)}


def difference(
    first: np.ndarray, second: np.ndarray, at: Ground, kind: str, condition: str, *, ranks: bool
) -> dict[str, Any]:
    """Whether one measure's correlation exceeds another's, on the pairs where both are defined; values oriented.

    The p-value is that of Meng, Rosenthal and Rubin, which assumes independent pairs; the interval is of the bootstrap
    over training runs.
    """
    kept = np.isfinite(first) & np.isfinite(second)
    x, other, y = first[kept], second[kept], at.agreed(kind, condition)[kept]
    one_unit, other_unit = (side[kept] for side in at.runs(kind))
    coefficient = spearman if ranks else pearson
    try:
        own, against, between = (coefficient(u, v).value for u, v in ((x, y), (other, y), (x, other)))
        drawn = [
            bootstrap(v, y, (one_unit, other_unit), ranks=ranks, draws=at.scale.draws, seed=at.seed) for v in (x, other)
        ]
        p = 1.0 if own == against else meng(own, against, between, len(x))[1]
    except ValueError as error:
        return {"why": str(error)}
    return {"value": own - against, "p": p, "over_models": percentile_interval(drawn[0] - drawn[1]), "n": len(x)}
