"""The trials of a measure: calibration, grounding in the behaviour of networks, and manipulation.

Calibration: untrained networks should be dissimilar, consecutive converged checkpoints similar. Grounding: does a
measure agree with the behaviour of networks? Manipulation: how far does a value move while answers stay the same, and
does it move when they break?
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from ..measures import linear_cka
from ..results import Closer
from ..stats import Sample
from .candidates import OVER_BUDGET, Candidate, CandidateValues, gather, values_of
from .population import (
    CLEAN,
    GROUPS,
    Agreement,
    Cohort,
    Images,
    Population,
    Scale,
    last_hidden,
    pairs_of,
    probing_images,
)

# Calibration

QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)
REPEATS = 5  # timings, of which the median is kept


def auc(alike: np.ndarray, unlike: np.ndarray, closer: Closer) -> float:
    """The share of comparisons in which a similar pair is closer than a dissimilar one; ties count half.

    1: the two do not overlap; ½: the measure does not distinguish them.
    """
    if not len(alike) or not len(unlike):
        raise ValueError(f"need values of both kinds, got {len(alike)} alike and {len(unlike)} unlike")
    wins = stats.mannwhitneyu(alike, unlike, method="asymptotic").statistic
    share = float(wins) / (len(alike) * len(unlike))
    return share if closer == "up" else 1 - share


class CalibrationNetworks:
    """The networks of calibration, and their activations at the last hidden layer for any images."""

    def __init__(self, scale: Scale, images: Images, population: Population, *, seed: int) -> None:
        self.scale, self.images, self.population, self.seed = scale, images, population, seed
        self._kept: dict[str, tuple[Tensor, list[Tensor], list[list[Tensor]]]] = {}

    def values(self, candidate: Candidate, kind: str, number: int) -> tuple[CandidateValues, CandidateValues]:
        """Values of similar and of dissimilar pairs, on the first `number` images of a kind."""
        options: dict[str, Any] = {"deadline": time.monotonic() + self.scale.budget}
        untrained: Sequence[Any] = self.population.untrained
        converged: Sequence[Sequence[Any]] = self.population.converged
        if candidate.of == "activations":
            inputs, untrained, converged = self.activations(kind)
            options |= {"inputs": inputs, "rows": number}
        ring = [(k, (k + 1) % len(untrained)) for k in range(len(untrained))]
        consecutive = [(k, k + 1) for k in range(self.scale.checkpoints - 1)]
        unlike = values_of(candidate, untrained, ring, **options)
        return gather(values_of(candidate, run, consecutive, **options) for run in converged), unlike

    def activations(self, kind: str) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
        """The flattened inputs, the activations of untrained networks, and those of the checkpoints of each run."""
        if kind not in self._kept:
            x = probing_images(kind, self.images, self.seed)
            untrained = [last_hidden(model, x) for model in self.population.untrained]
            converged = [[last_hidden(model, x) for model in run] for run in self.population.converged]
            self._kept[kind] = x.flatten(1).double(), untrained, converged
        return self._kept[kind]

    def seconds(self, candidate: Candidate, number: int) -> float:
        """The median time for one pair, with nothing computed beforehand."""
        converged: Sequence[Sequence[Any]] = self.population.converged
        inputs = None
        if candidate.of == "activations":
            inputs, _, converged = self.activations(CLEAN)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            values_of(candidate, converged[0][:2], [(0, 1)], inputs=inputs, rows=number)
            if inputs is not None and inputs.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if sum(times) > self.scale.budget / 10:
                break
        return statistics.median(times)


def calibrate(candidate: Candidate, closer: Closer, probes: CalibrationNetworks) -> dict[str, Any]:
    """Separation of the two distributions: with all images, with fewer, and with corrupted ones."""
    scale = probes.scale
    most = min(candidate.rows or scale.test, len(probes.images.test))
    numbers = sorted({*(n for n in scale.numbers if n < most), most})
    if candidate.of == "models":
        whole = _summary(*probes.values(candidate, CLEAN, most), closer)
        return {"number": None, "clean": whole, "numbers": [], "kinds": {},
                "seconds": [[None, probes.seconds(candidate, most)]]}  # fmt: skip
    by_number = [[n, _summary(*probes.values(candidate, CLEAN, n), closer)] for n in numbers]
    by_kind = {kind: _summary(*probes.values(candidate, kind, most), closer) for kind in scale.corruptions}
    return {
        "number": most,
        "clean": by_number[-1][1],
        "numbers": by_number,
        "kinds": by_kind,
        "seconds": [[n, probes.seconds(candidate, n)] for n in numbers],
    }


def _summary(alike: CandidateValues, unlike: CandidateValues, closer: Closer) -> dict[str, Any]:
    near, far = (side.values[side.defined] for side in (alike, unlike))
    return {
        "auc": auc(near, far, closer) if len(near) and len(far) else None,
        "alike": _distribution(near),
        "unlike": _distribution(far),
        "undefined": dict((alike.reasons + unlike.reasons).most_common(3)),
    }


def _distribution(values: np.ndarray) -> dict[str, Any] | None:
    if not len(values):
        return None
    return {"n": len(values), "mean": float(values.mean()), "quantiles": np.quantile(values, QUANTILES).tolist()}


# Grounding: correlations with the share of images on which networks agree, their intervals, and tests of differences

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
    """Pearson's r with the interval and the two-sided p of Fisher's z, atanh(r), with standard error 1/√(n − 3)."""
    x, y = _checked(x, y)
    r, n = float(weighted_pearson(x, y, np.ones((1, len(x))))[0]), len(x)
    if abs(r) == 1:
        return Correlation(r, r, r, 0.0, n)
    z, error = math.atanh(r), 1 / math.sqrt(n - 3)
    reach = float(stats.norm.ppf((1 + LEVEL) / 2)) * error
    return Correlation(r, math.tanh(z - reach), math.tanh(z + reach), 2 * float(stats.norm.sf(abs(z) / error)), n)


def spearman(x: Array, y: Array) -> Correlation:
    """Spearman's ρ, ties at their mean rank; the interval is Fisher's as for r, which is a little narrow."""
    x, y = _checked(x, y)
    return pearson(stats.rankdata(x), stats.rankdata(y))


def bootstrap(
    x: Array, y: Array, units: tuple[Array, Array], *, ranks: bool, draws: int = 1000, seed: int = 0
) -> Array:
    """The coefficient in each draw of a bootstrap over units (training runs), since pairs share them.

    `units` are the numbers of the two units of each pair. The weight of a pair is the product of the counts of its
    units in the draw (Snijders and Borgatti 1999); that of a pair within one unit is the unit's count. The same seed
    and units give the same draws, so that two measures can be compared draw by draw. A draw in which nothing varies is
    NaN.
    """
    x, y = _checked(x, y)
    _, numbers = np.unique(np.concatenate(units), return_inverse=True)
    a, b, count = numbers[: len(x)], numbers[len(x) :], int(numbers.max()) + 1
    random = np.random.default_rng(seed)
    coefficients = []
    for start in range(0, draws, DRAWS_AT_ONCE):
        size = min(DRAWS_AT_ONCE, draws - start)
        drawn = random.multinomial(count, np.full(count, 1 / count), size=size)
        weights = np.where(a == b, drawn[:, a], drawn[:, a] * drawn[:, b]).astype(np.float64)
        coefficients.append(weighted_spearman(x, y, weights) if ranks else weighted_pearson(x, y, weights))
    return np.concatenate(coefficients)


def percentile_interval(draws: Array) -> list[float] | None:
    """[low, high] of the middle 95 % of draws; None if more than a tenth of them are undefined."""
    defined = draws[np.isfinite(draws)]
    if len(defined) < 0.9 * len(draws):
        return None
    return np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()


def weighted_pearson(x: Array, y: Array, weights: Array) -> Array:
    """r of pairs with `weights` (draws, pairs), the number of times each counts; NaN if one side does not vary."""
    x, y = (np.broadcast_to(v, weights.shape) for v in (x, y))
    total = weights.sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        dx, dy = (v - (weights * v).sum(1, keepdims=True) / total for v in (x, y))
        xx, yy, xy = ((weights * u * v).sum(1) for u, v in ((dx, dx), (dy, dy), (dx, dy)))
        # A side that is constant in a draw does not vary, though rounding leaves a little variance.
        rounding = [1e-24 * (weights * v * v).sum(1) for v in (x, y)]
        r = np.clip(xy / np.sqrt(xx * yy), -1, 1)  # Cauchy-Schwarz: anything beyond is rounding
        return np.where((xx > rounding[0]) & (yy > rounding[1]), r, np.nan)


def weighted_spearman(x: Array, y: Array, weights: Array) -> Array:
    """ρ of pairs with `weights`: the value for pairs that are repeated this many times."""
    return weighted_pearson(_weighted_ranks(x, weights), _weighted_ranks(y, weights), weights)


def _weighted_ranks(x: Array, weights: Array) -> Array:
    """Mean ranks (draws, pairs) among values that are repeated `weights` times."""
    values, group = np.unique(x, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(values)))
    of_group = np.add.reduceat(weights[:, order], starts, axis=1)
    before = np.cumsum(of_group, axis=1) - of_group
    return (before + (of_group + 1) / 2)[:, group]


def meng(first: float, second: float, between: float, n: int) -> tuple[float, float]:
    """Z of Meng, Rosenthal and Rubin (1992, eq. 1) for correlations of two variables with a third, and its p-value.

    `between` is the correlation of the two variables, all of one sample. The test is based on Fisher's z, as the
    intervals are. It assumes independent pairs; the bootstrap over training runs shows the effect of sharing them.
    """
    if n < 4:
        raise ValueError(f"comparing two correlations needs at least 4 pairs, got {n}")
    if not all(abs(r) < 1 for r in (first, second, between)):
        raise ValueError(f"perfect correlations cannot be tested: got {first}, {second} and {between} between them")
    if 1 - first**2 - second**2 - between**2 + 2 * first * second * between < -1e-9:
        raise ValueError(f"no three variables have correlations {first}, {second} and {between}: check the signs")
    mean_square = (first**2 + second**2) / 2
    f = min((1 - between) / (2 * (1 - mean_square)), 1.0)  # the paper's own ceiling
    h = (1 - f * mean_square) / (1 - mean_square)
    z = (math.atanh(first) - math.atanh(second)) * math.sqrt((n - 3) / (2 * (1 - between) * h))
    return z, 2 * float(stats.norm.sf(abs(z)))


def _checked(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = (np.asarray(v, dtype=np.float64) for v in (x, y))
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"a correlation needs two vectors of equal length, got shapes {x.shape} and {y.shape}")
    if len(x) < 4:
        raise ValueError(f"a correlation with an interval needs at least 4 pairs, got {len(x)}")
    for side, v in (("first", x), ("second", y)):
        if not np.isfinite(v).all():
            raise ValueError(f"the {side} variable has {int((~np.isfinite(v)).sum())} values that are not finite")
        if np.ptp(v) <= 1e-12 * np.abs(v).max():
            raise ValueError(f"the {side} variable is {v[0]:.4g} for all {len(v)} pairs: the correlation is undefined")
    return x, y


TOGETHER = 32  # networks whose activations are compared at a time
COEFFICIENTS = {"pearson": pearson, "spearman": spearman}


class UndefinedScore(ValueError):
    """Raised when a measure is undefined for all pairs of a kind, by its definition: this is not a failure."""


class Ground:
    """The pairs of networks, their activations at the last hidden layer for clean images, and their agreement."""

    def __init__(
        self, scale: Scale, population: Population, agreement: Agreement, images: Tensor, *, seed: int
    ) -> None:
        self.scale, self.population, self.agreement, self.seed = scale, population, agreement, seed
        self.inputs = images.flatten(1).double()
        self.activations = [last_hidden(model, images) for model in population.models]

    def pairs(self, kind: str) -> np.ndarray:
        """(pairs, 2) numbers of networks."""
        return np.array([pair for cohort in self.population.cohorts[kind] for pair in pairs_of(cohort)]).reshape(-1, 2)

    def values(self, candidate: Candidate, kind: str) -> CandidateValues:
        """The values of all pairs, by cohorts in a seeded order, so that an exhausted budget leaves a fair sample."""
        cohorts, deadline = self.population.cohorts[kind], time.monotonic() + self.scale.budget
        networks: Sequence[Any] = self.activations if candidate.of == "activations" else self.population.models
        values: dict[tuple[int, int], float] = {}
        reasons: Counter[str] = Counter()
        for lot in _lots(np.random.default_rng(self.seed).permutation(len(cohorts)).tolist(), cohorts):
            members = [member for k in lot for member in cohorts[k]]
            place = {member: number for number, member in enumerate(members)}
            pairs = [pair for k in lot for pair in pairs_of(cohorts[k])]
            part = values_of(
                candidate,
                [networks[member] for member in members],
                [(place[a], place[b]) for a, b in pairs],
                inputs=self.inputs,
                rows=candidate.rows,
                deadline=deadline,
            )
            values.update(zip(pairs, part.values, strict=True))
            reasons += part.reasons
        return CandidateValues(np.array([values[a, b] for a, b in self.pairs(kind)], dtype=np.float64), reasons)

    def runs(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """The training runs of the two networks of each pair, which the bootstrap draws."""
        runs, pairs = np.array(self.population.runs), self.pairs(kind)
        return runs[pairs[:, 0]], runs[pairs[:, 1]]

    def agreed(self, kind: str, condition: str) -> np.ndarray:
        """The share of images on which the networks of each pair agree."""
        pairs = self.pairs(kind)
        return self.agreement[condition][pairs[:, 0], pairs[:, 1]]


def _lots(order: Sequence[int], cohorts: Sequence[Cohort]) -> Iterator[list[int]]:
    """Cohorts in this order, in lots of at most `TOGETHER` networks, to limit the memory."""
    lot: list[int] = []
    for k in order:
        if lot and sum(len(cohorts[j]) for j in [*lot, k]) > TOGETHER:
            yield lot
            lot = []
        lot.append(k)
    if lot:
        yield lot


def ground(candidate: Candidate, closer: Closer, at: Ground, kind: str) -> dict[str, Any]:
    """Correlations over the pairs of one kind: with intervals for groups of conditions, without for each alone."""
    result = at.values(candidate, kind)
    defined = result.defined
    if not defined.any():
        why = result.reasons.most_common(1)[0][0] if result.reasons else "there are no pairs"
        if OVER_BUDGET in result.reasons:
            raise ValueError(f"no pair of networks that differ in {kind} has a value: {why}")
        raise UndefinedScore(f"not defined for networks that differ in {kind}: {why}")
    oriented = result.values[defined] * (1 if closer == "up" else -1)
    units_a, units_b = (side[defined] for side in at.runs(kind))
    agreed = {name: at.agreed(kind, name)[defined] for name in at.agreement}
    groups = {n: _correlations(oriented, agreed[n], at, (units_a, units_b)) for n in GROUPS if n in agreed}
    alone = {name: _correlations(oriented, y, at) for name, y in agreed.items() if name not in GROUPS}
    return {
        "values": result.values,
        "pairs": len(defined),
        "defined": int(defined.sum()),
        "undefined": dict(result.reasons.most_common(3)),
        "groups": groups,
        "conditions": alone,
    }


def _correlations(x: Array, y: Array, at: Ground, units: tuple[Array, Array] | None = None) -> dict[str, Any]:
    """Each coefficient: its value alone, or with all intervals if the units are given."""
    try:
        plain = {name: coefficient(x, y) for name, coefficient in COEFFICIENTS.items()}
        if units is None:
            return {name: correlation.value for name, correlation in plain.items()}
        correlations = {}
        for name, correlation in plain.items():
            draws = bootstrap(x, y, units, ranks=name == "spearman", draws=at.scale.draws, seed=at.seed)
            correlations[name] = asdict(correlation) | {"over_models": percentile_interval(draws)}
        return correlations
    except ValueError as error:
        return {"why": str(error)}


def difference(
    first: np.ndarray, second: np.ndarray, at: Ground, kind: str, condition: str, *, ranks: bool
) -> dict[str, Any]:
    """The difference of two measures' correlations, on the pairs where both are defined; values oriented.

    The p-value is that of Meng, Rosenthal and Rubin, which assumes independent pairs; the interval is of the bootstrap
    over training runs.
    """
    kept = np.isfinite(first) & np.isfinite(second)
    u, v, y = first[kept], second[kept], at.agreed(kind, condition)[kept]
    unit_a, unit_b = (side[kept] for side in at.runs(kind))
    coefficient = spearman if ranks else pearson
    options: dict[str, Any] = {"ranks": ranks, "draws": at.scale.draws, "seed": at.seed}
    try:
        r, s, between = (coefficient(*pair).value for pair in ((u, y), (v, y), (u, v)))
        draws = bootstrap(u, y, (unit_a, unit_b), **options) - bootstrap(v, y, (unit_a, unit_b), **options)
        p = 1.0 if r == s else meng(r, s, between, len(y))[1]
    except ValueError as error:
        return {"why": str(error)}
    return {"value": r - s, "p": p, "over_models": percentile_interval(draws), "n": len(y)}


# Manipulation

FACTORS = 10.0  # neurons are rescaled by up to this, or its inverse
SHARE = 0.1  # of the rows are translated
DISTANCES = (1.0, 10.0, 100.0)  # times the root mean square length of a row; the largest move counts
STEPS = 200  # of the search for a self-map


@dataclass(frozen=True)
class Behaviour:
    """The activations and answers of a network; without a model if only its activations were changed."""

    rows: Tensor  # (n, p) at the last hidden layer
    answers: Tensor  # (n,)
    model: nn.Module | None

    @classmethod
    def of(cls, model: nn.Sequential, images: Tensor) -> Behaviour:
        return cls(last_hidden(model, images), model(images).argmax(1), model)


# Changes a copy of a network and returns it, or returns activations at several strengths; None: not possible.
Make = Callable[[nn.Sequential, Tensor, torch.Generator], nn.Sequential | list[Tensor] | None]


@dataclass(frozen=True)
class Manipulation:
    """A change to a network, and whether it is meant to keep the network's answers."""

    name: str
    keeps: bool
    about: str
    make: Make


MANIPULATIONS: list[Manipulation] = []


def _manipulation(name: str, about: str, *, keeps: bool) -> Callable[[Make], Make]:
    def declare(make: Make) -> Make:
        MANIPULATIONS.append(Manipulation(name, keeps, about, make))
        return make

    return declare


def _layers(model: nn.Sequential) -> list[nn.Linear]:
    return [part for part in model if isinstance(part, nn.Linear)]


@_manipulation("permuted", "the neurons of every hidden layer in a random order", keeps=True)
def _permute(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    for layer, after in itertools.pairwise(_layers(model)):
        order = torch.randperm(layer.out_features, generator=random).to(layer.weight.device)
        layer.weight.copy_(layer.weight[order])
        layer.bias.copy_(layer.bias[order])
        after.weight.copy_(after.weight[:, order])
    return model


@_manipulation("rescaled", f"every neuron times 1/{FACTORS:g} to {FACTORS:g}, its readers by the inverse", keeps=True)
def _rescale(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    model.double()
    for layer, after in itertools.pairwise(_layers(model)):
        factor = FACTORS ** (2 * torch.rand(layer.out_features, generator=random, dtype=torch.float64) - 1)
        factor = factor.to(layer.weight.device)
        layer.weight.mul_(factor[:, None])
        layer.bias.mul_(factor)
        after.weight.div_(factor)
    return model.float()


@_manipulation("dark pixels", "random weights, as large as the rest, on pixels that are 0 in all images", keeps=True)
def _dark_pixels(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential | None:
    dark = (images.flatten(1) == 0).all(0)
    if not bool(dark.any()):
        return None
    weight = _layers(model)[0].weight
    noise = torch.randn(weight.shape, generator=random).to(weight.device) * dark
    weight.add_(noise * (weight.norm() / noise.norm()))
    return model


def _unread(model: nn.Sequential) -> Tensor | None:
    """(p, k): orthonormal directions of the last hidden layer that the output layer ignores."""
    weight = _layers(model)[-1].weight.double()
    k = weight.shape[1] - weight.shape[0]
    return torch.linalg.svd(weight).Vh[weight.shape[0] :].T if k > 0 else None


@_manipulation(
    "translated rows",
    f"{SHARE:.0%} of the rows moved along a direction that the output layer does not read, by {DISTANCES[0]:g} to "
    f"{DISTANCES[-1]:g} times their length",
    keeps=True,
)
def _translate_rows(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Tensor] | None:
    """Davari et al. 2023: move a subset of the rows away, here along a direction that the output does not read."""
    unread, rows = _unread(model), last_hidden(model, images)
    if unread is None:
        return None
    chosen = torch.randperm(len(images), generator=random)[: max(1, round(SHARE * len(images)))].to(images.device)
    lengths = torch.zeros_like(rows[:, :1])
    lengths[chosen] = rows.square().sum(1).mean().sqrt()
    return [rows + distance * lengths * unread[:, 0] for distance in DISTANCES]


@_manipulation("self-map", "a linear map, unread by the output layer, sought so that linear CKA is least", keeps=True)
def _self_map(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential | None:
    """A linear map of the last hidden layer, x + N Bᵀx with N unread, B sought so that linear CKA with x is least."""
    unread, rows = _unread(model), last_hidden(model, images)
    if unread is None:
        return None
    start = torch.randn(rows.shape[1], unread.shape[1], generator=random, dtype=torch.float64).to(rows.device)
    b = (0.1 * start).requires_grad_()
    optimiser = torch.optim.Adam([b], lr=0.05)
    with torch.enable_grad():
        for _ in range(STEPS):
            optimiser.zero_grad()
            linear_cka.from_sample(Sample.of(rows + rows @ b @ unread.T, rows)).backward()
            optimiser.step()
    return _with_map(model, torch.eye(rows.shape[1]).to(rows) + b.detach() @ unread.T)


@_manipulation("classes rolled", "the output layer names the next class", keeps=False)
def _roll_classes(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    last = _layers(model)[-1]
    last.weight.copy_(last.weight.roll(1, 0))
    last.bias.copy_(last.bias.roll(1))
    return model


@_manipulation("biased", "the output layer's bias names one class always", keeps=False)
def _bias(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    outputs = model(images)
    _layers(model)[-1].bias[0] += outputs.amax() - outputs.amin() + 1
    return model


@_manipulation("rotated", "the last hidden layer rotated at random, the output layer as before", keeps=False)
def _rotate(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    width = _layers(model)[-1].in_features
    turn = torch.linalg.qr(torch.randn(width, width, generator=random, dtype=torch.float64)).Q
    return _with_map(model, turn.to(images.device))


@_manipulation("one direction", "all but the first principal component of the last hidden layer deleted", keeps=False)
def _one_direction(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    """Ding et al. 2021 delete principal components; here all but the first are deleted, about the mean."""
    rows = last_hidden(model, images)
    mean = rows.mean(0)
    first = torch.linalg.svd(rows - mean, full_matrices=False).Vh[0]
    projection = torch.outer(first, first)
    return _with_map(model, projection, mean - mean @ projection)


def _with_map(model: nn.Sequential, matrix: Tensor, bias: Tensor | None = None) -> nn.Sequential:
    """Insert a linear layer x ↦ x M + b before the last layer; it becomes the last hidden layer."""
    p, q = matrix.shape
    layer = nn.Linear(p, q, bias=bias is not None, device=matrix.device).requires_grad_(False)
    layer.weight.copy_(matrix.T)
    if bias is not None:
        layer.bias.copy_(bias)
    return nn.Sequential(*list(model)[:-1], layer, model[-1]).eval()


class Bench:
    """Networks before and after each manipulation, made once for all measures."""

    @torch.no_grad()
    def __init__(self, models: Sequence[nn.Sequential], images: Tensor, *, seed: int) -> None:
        self.images, self.inputs = images, images.flatten(1).double()
        self.before = [Behaviour.of(model, images) for model in models]
        self.changed: dict[str, list[list[Behaviour] | None]] = {m.name: [] for m in MANIPULATIONS}
        for manipulation, (k, model) in itertools.product(MANIPULATIONS, enumerate(models)):
            made = manipulation.make(copy.deepcopy(model), images, torch.Generator().manual_seed(seed + k))
            if isinstance(made, nn.Sequential):
                after: list[Behaviour] | None = [Behaviour.of(made, images)]
            else:
                read_out = copy.deepcopy(model[-1]).double()
                after = None if made is None else [Behaviour(rows, read_out(rows).argmax(1), None) for rows in made]
            self.changed[manipulation.name].append(after)

    def agreement(self, name: str) -> float | None:
        """The smallest share of images, over networks and strengths, with the same answer as before."""
        shares = (
            float((changed.answers == before.answers).double().mean())
            for before, strengths in zip(self.before, self.changed[name], strict=True)
            for changed in strengths or ()
        )
        return min(shares, default=None)


def manipulate(candidate: Candidate, far: float | None, bench: Bench) -> dict[str, Any]:
    """The value after each manipulation, and how far it moved: 0 is a network with itself, 1 untrained networks.

    `far` is the mean value of untrained networks. The largest move over strengths and networks counts if the answers
    are kept, otherwise the mean over networks.
    """
    same = [_value(candidate, before, before, bench) for before in bench.before]
    outcomes = {m.name: _outcome(candidate, m, same, far, bench) for m in MANIPULATIONS}
    return {"same": float(np.mean(same)), "far": far, "manipulations": outcomes}


def _outcome(
    candidate: Candidate, manipulation: Manipulation, same: list[float], far: float | None, bench: Bench
) -> dict[str, Any]:
    facts = {"keeps": manipulation.keeps, "about": manipulation.about, "agreement": bench.agreement(manipulation.name)}
    values, moves = [], []
    try:
        for start, before, strengths in zip(same, bench.before, bench.changed[manipulation.name], strict=True):
            if strengths is None:
                return facts | {"why": "not possible for these networks and images"}
            if candidate.of == "models" and any(changed.model is None for changed in strengths):
                return facts | {"why": "changes activations, but the measure reads networks"}
            after = np.array([_value(candidate, before, changed, bench) for changed in strengths])
            values.append(float(after[np.abs(after - start).argmax()]))
            if far is not None and abs(start - far) > 1e-6 * max(abs(start), abs(far)):
                moves.append((start - values[-1]) / (start - far))
    except Exception as error:
        return facts | {"why": f"{type(error).__name__}: {error}"}
    if len(moves) < len(values):
        why = "untrained networks have the same value as a network with itself, so moves have no scale"
        return facts | {"value": float(np.mean(values)), "why": why}
    moved = max(moves, key=abs) if manipulation.keeps else float(np.mean(moves))
    return facts | {"value": float(np.mean(values)), "moved": float(moved)}


def _value(candidate: Candidate, before: Behaviour, after: Behaviour, bench: Bench) -> float:
    networks: Any = [side.rows if candidate.of == "activations" else side.model for side in (before, after)]
    pair = values_of(candidate, networks, [(0, 1)], inputs=bench.inputs, rows=candidate.rows)
    if not pair.defined[0]:
        raise ValueError(next(iter(pair.reasons)))
    return float(pair.values[0])
