"""Models of dissimilarities: fitted, held against subjects with their noise ceiling, and compared with each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import nnls
from scipy.stats import false_discovery_control, t
from torch import Tensor

from ..checks import one_of, whole_number
from ..measures.dissimilarities import COMPARATORS, KENDALL, kendall, row_sums, whitened
from ..notebook import html_facts
from ..process_state import torch_on_one_core
from .rdms import Array, RDMs, comparator, compare_rdms, new_figure, same_stimuli

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FITS = ("fixed", "weighted", "selected")
BOOTSTRAPS = ("stimuli", "subjects", "both")
CORRECTIONS = ("holm", "bonferroni", "fdr", "none")
LEAST = 3  # different stimuli, or subjects, of which anything can be estimated
REDRAWN = 0.25  # of the bootstrap draws, at most, for lack of a value; more would bias the spread
CANCELLED = 1e-12  # of the lengths of subjects: a shorter sum is rounding
BAR, BAND = "#2f5fa8", "#c9c6bd"  # of a plot


@dataclass(frozen=True)
class Model:
    """A prediction of dissimilarities by one or several RDMs.

    "fixed": one RDM as it is. "weighted": their sum with the non-negative weights that fit the training data best.
    "selected": the one of them that fits the training data best.
    """

    rdms: RDMs
    fit: str = "fixed"
    name: str = ""  # empty: the name of the RDM, or names joined by +

    def __post_init__(self) -> None:
        one_of(self.fit, "fit", FITS)
        if self.fit == "fixed" and len(self.rdms) != 1:
            raise ValueError(
                f"a fixed model is one RDM, got {len(self.rdms)}: select one, or fit='weighted' or 'selected'"
            )
        object.__setattr__(self, "name", self.name or "+".join(self.rdms.names))

    def weights(self, subjects: RDMs, compare: str = "spearman") -> Array:
        """The weight of each RDM that fits the mean of these subjects best.

        By cosines and Pearson, whitened or not, this is the best weighted sum. By ranks it is that of Pearson: a sum of
        ranks has no such solution.
        """
        same_stimuli(self.rdms, subjects)
        every = np.arange(len(subjects.stimuli))
        return _weights(self, torch.from_numpy(subjects.matrices), every, comparator(compare))


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """How well models predict subjects, with what the bootstrap says of it."""

    names: tuple[str, ...]
    values: Array  # (models,): mean similarity to the subjects, of cross-validated predictions if there are folds
    of_subjects: Array  # (models, subjects)
    errors: Array  # (models,) standard errors
    low: Array  # (models,) 95 % interval, by Student's t
    high: Array
    ceiling: tuple[float, float] | None  # lower and upper noise ceiling; None with one subject
    p_zero: Array  # (models,) one-sided: is it above 0? Corrected
    p_ceiling: Array | None  # (models,) one-sided: is it below the lower noise ceiling? Corrected
    differences: Array  # (models, models): value of the row less that of the column
    p_pairs: Array  # (models, models) two-sided, corrected; NaN on the diagonal
    compare: str
    bootstrap: str
    draws: int
    correction: str
    subjects: tuple[str, ...] = field(default=())

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each model."""
        return [
            {
                "model": name,
                "value": float(self.values[k]),
                "standard_error": float(self.errors[k]),
                "low": float(self.low[k]),
                "high": float(self.high[k]),
                "p_zero": float(self.p_zero[k]),
                "p_ceiling": None if self.p_ceiling is None else float(self.p_ceiling[k]),
            }
            for k, name in enumerate(self.names)
        ]

    def pairs(self) -> list[dict[str, Any]]:
        """One dict for each pair of models."""
        return [
            {
                "model_a": self.names[i],
                "model_b": self.names[j],
                "difference": float(self.differences[i, j]),
                "p": float(self.p_pairs[i, j]),
            }
            for i, j in combinations(range(len(self.names)), 2)
        ]

    def plot(self) -> Figure:
        """A matplotlib figure: a bar for each model with its 95 % interval, and the noise ceiling as a band."""
        figure = new_figure(1.8 + 0.9 * len(self.names), 4)
        axes = figure.add_subplot()
        places = np.arange(len(self.names))
        axes.bar(places, self.values, width=0.7, color=BAR)
        reach = np.array([self.values - self.low, self.high - self.values])
        axes.errorbar(places, self.values, reach, fmt="none", ecolor="black", capsize=3, linewidth=1)
        if self.ceiling is not None:
            axes.axhspan(*self.ceiling, color=BAND, zorder=0, label="noise ceiling")
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.1))
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xticks(places, self.names, rotation=45, ha="right", parse_math=False)
        axes.set_ylabel(self.compare.replace("_", " "))
        axes.spines[["top", "right"]].set_visible(False)
        return figure

    def _about(self) -> dict[str, str]:
        about = {}
        for row in self.rows():
            fact = "{value:.3f} [{low:.3f}, {high:.3f}], above 0: p = {p_zero:.2g}".format(**row)
            if row["p_ceiling"] is not None:
                fact += f", below the ceiling: p = {row['p_ceiling']:.2g}"
            about[row["model"]] = fact
        if self.ceiling is not None:
            about["noise ceiling"] = "{:.3f} to {:.3f}".format(*self.ceiling)
        about["compared by"] = self.compare
        about["bootstrap"] = f"{self.bootstrap}, {self.draws} draws; p corrected: {self.correction}"
        return about

    def __repr__(self) -> str:
        about = self._about()
        width = max(map(len, about))
        return "\n".join(f"{name:<{width}}  {fact}" for name, fact in about.items())

    def _repr_html_(self) -> str:
        return html_facts(f"{len(self.names)} models of {len(self.subjects)} subjects", self._about())


@torch_on_one_core()
def noise_ceiling(subjects: RDMs, compare: str = "spearman") -> tuple[float, float]:
    """The lower and the upper bound of what the best possible model would reach.

    Upper: the mean similarity of each subject to the mean of all, which knows their noise. Lower: to the mean of the
    others. The mean is over what the comparator compares: ranks, or RDMs of one length. A mean in which subjects
    cancel, such as that of two opposite ones, predicts nothing: the similarity to it is 0. Subjects may be seeds of a
    network.
    """
    if len(subjects) < 2:
        raise ValueError("a noise ceiling needs the RDMs of at least 2 subjects, or seeds, got 1")
    compare_rdms(subjects, subjects, comparator(compare))  # raises for what has no similarity
    vectors = _vectors(torch.from_numpy(subjects.matrices), np.arange(len(subjects.stimuli)), compare)
    return _ceiling(vectors, torch.ones(len(subjects), dtype=torch.float64), compare)


@torch_on_one_core()
def evaluate(
    models: RDMs | Model | Iterable[Model | RDMs],
    subjects: RDMs,
    compare: str = "spearman",
    *,
    folds_stimuli: int | None = None,
    folds_subjects: int | None = None,
    bootstrap: str | None = None,
    draws: int = 1000,
    correction: str = "holm",
    seed: int = 0,
) -> Evaluation:
    """Hold models against the RDMs of subjects: each against 0, the noise ceiling and the others.

    An RDM is a fixed model. Models that are fitted need folds: they are fitted to some stimuli, or subjects, or both,
    and evaluated on the others, and so are fixed models beside them.

    `bootstrap` says what other samples could differ in: "stimuli", "subjects", or "both" (the default; "stimuli" with
    fewer than 3 subjects). Pairs of a stimulus with its own copy are left out. Resampling both counts the noise of
    single measurements three times, so the variance is that of stimuli and of subjects twice, less that of both (Schütt
    et al. 2023). Tests are Student's t with one less degree of freedom than there are stimuli, or subjects if fewer.

    `correction` of p for the number of tests of one kind: "holm", "bonferroni", "fdr" (Benjamini and Hochberg), "none".
    """
    chosen = _as_models([models] if isinstance(models, (RDMs, Model)) else models)
    comparator(compare)
    for model in chosen:
        same_stimuli(model.rdms, subjects)
        compare_rdms(model.rdms, subjects, compare)  # raises for what has no similarity
    bootstrap = bootstrap or ("both" if len(subjects) >= LEAST else "stimuli")
    one_of(bootstrap, "bootstrap", BOOTSTRAPS)
    one_of(correction, "correction", CORRECTIONS)
    whole_number(draws, "draws", least=20)
    if bootstrap != "stimuli" and len(subjects) < LEAST:
        raise ValueError(
            f"a bootstrap over subjects needs at least {LEAST} of them, got {len(subjects)}: use bootstrap='stimuli'"
        )
    folds = _checked_folds(chosen, subjects, folds_stimuli, folds_subjects)
    trial = _Trial(chosen, torch.from_numpy(subjects.matrices), compare, folds, seed)
    stimuli, everyone = np.arange(len(subjects.stimuli)), np.ones(len(subjects), int)
    of_subjects, *ceiling = trial.run(stimuli, everyone)
    values = of_subjects.mean(1)
    if not np.isfinite(values).all():
        name = chosen[int(np.argmin(np.isfinite(values)))].name
        raise ValueError(f"{name} is the same for all test stimuli of a fold: use fewer folds of stimuli")
    kinds = ("stimuli", "subjects", "both") if bootstrap == "both" else (bootstrap,)
    samples = {kind: _resampled(trial, kind, draws, seed + k) for k, kind in enumerate(kinds)}
    count = len(chosen)
    limits = {"stimuli": len(stimuli), "subjects": len(everyone)}
    degrees = min(limits[kind] for kind in kinds if kind != "both") - 1

    def error(contrast: Array) -> float:
        spread = {kind: np.var(sample[:, : len(contrast)] @ contrast, ddof=1) for kind, sample in samples.items()}
        return math.sqrt(_variance(spread, limits))

    units = np.eye(count)
    errors = np.array([error(unit) for unit in units])
    reach = t.ppf(0.975, degrees) * errors
    p_zero = t.sf(_ratio(values, errors), degrees)
    p_ceiling = None
    if len(subjects) > 1:
        below = ceiling[0] - values
        spread = np.array([error(np.append(-unit, 1.0)) for unit in units])
        p_ceiling = corrected(t.sf(_ratio(below, spread), degrees), correction)
    pairs = list(combinations(range(count), 2))
    differences = values[:, None] - values
    spread = np.array([error(units[i] - units[j]) for i, j in pairs])
    apart = np.array([abs(differences[pair]) for pair in pairs])
    p_pairs = np.full((count, count), np.nan)
    for (i, j), p in zip(pairs, corrected(2 * t.sf(_ratio(apart, spread), degrees), correction), strict=True):
        p_pairs[i, j] = p_pairs[j, i] = p
    return Evaluation(
        names=tuple(model.name for model in chosen),
        values=values,
        of_subjects=of_subjects,
        errors=errors,
        low=values - reach,
        high=values + reach,
        ceiling=(ceiling[0], ceiling[1]) if len(subjects) > 1 else None,
        p_zero=corrected(p_zero, correction),
        p_ceiling=p_ceiling,
        differences=differences,
        p_pairs=p_pairs,
        compare=compare,
        bootstrap=bootstrap,
        draws=draws,
        correction=correction,
        subjects=subjects.names,
    )


def corrected(p: Array, correction: str) -> Array:
    """p-values corrected for how many there are."""
    p = np.asarray(p, float)
    if correction == "none" or len(p) < 2:
        return p
    if correction == "fdr":
        return np.asarray(false_discovery_control(p))
    if correction == "bonferroni":
        return np.minimum(p * len(p), 1)
    order = np.argsort(p)
    found = np.empty_like(p)
    found[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return found


def _as_models(models: Iterable[Model | RDMs]) -> list[Model]:
    found: list[Model] = []
    for each in models:
        found += [each] if isinstance(each, Model) else [Model(each[[name]]) for name in each.names]
    names = [model.name for model in found]
    if not found or len(set(names)) < len(names):
        raise ValueError(f"models need names of their own, got {names}" if found else "no models to evaluate")
    return found


def _checked_folds(
    models: list[Model], subjects: RDMs, stimuli: int | None, people: int | None
) -> tuple[int | None, int | None]:
    if stimuli is not None:
        if (n := len(subjects.stimuli)) < 4 * LEAST:
            raise ValueError(f"folds of stimuli need at least {4 * LEAST} stimuli, got {n}: use folds_subjects=")
        why = f"in a bootstrap draw, which lacks a third of the stimuli, each fold needs {LEAST}"
        whole_number(stimuli, "folds_stimuli", least=2, most=len(subjects.stimuli) // (2 * LEAST), why=why)
    if people is not None:
        whole_number(people, "folds_subjects", least=2, most=len(subjects))
    fitted = [model.name for model in models if model.fit != "fixed"]
    if fitted and stimuli is None and people is None:
        raise ValueError(
            f"{fitted[0]} is fitted, and would be evaluated on what it is fitted to: give folds_stimuli= (2, say) or "
            "folds_subjects="
        )
    return stimuli, people


def _ratio(value: Array, error: Array) -> Array:
    """value / error; without any spread, infinite unless the value is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(value == 0, 0.0, value / error)


# The bootstrap


def _resampled(trial: _Trial, kind: str, draws: int, seed: int) -> Array:
    """(draws, models + 1): the values and the lower ceiling of samples with replacement."""
    random = np.random.default_rng(seed)
    stimuli, people = np.arange(trial.subjects.shape[1]), len(trial.subjects)
    found: list[list[float]] = []
    for _ in range(int((1 + REDRAWN) * draws)):
        order = random.choice(stimuli, len(stimuli)) if kind != "subjects" else stimuli
        counts = np.ones(people, int)
        if kind != "stimuli":
            counts = np.bincount(random.integers(people, size=people), minlength=people)
        of_subjects, lower, _ = trial.run(order, counts)
        row = [*(of_subjects @ counts[counts > 0] / counts.sum()), lower if people > 1 else 0.0]
        found += [row] if np.isfinite(row).all() else []
        if len(found) == draws:
            return np.array(found)
    raise ValueError(
        f"more than {REDRAWN:.0%} of the bootstrap draws over {kind} have no value: too few different stimuli or "
        "subjects for the folds, or a model that is the same for most pairs; use fewer folds, or bootstrap the other"
    )


def _variance(spread: dict[str, float], limits: dict[str, int]) -> float:
    """The variance of a value over new stimuli, subjects, or both, from those of its bootstraps.

    A resampled mean of n varies by (n − 1) / n of what it should. With the variance S of stimuli, P of subjects and N
    of the noise, the bootstraps give S + N, P + N and S + P + 3 N; S + P + N is wanted.
    """
    wider = {kind: n / (n - 1) for kind, n in limits.items() if kind in spread}
    if "both" not in spread:
        return next(wider[kind] * variance for kind, variance in spread.items())
    stimuli, subjects = (wider[kind] * spread[kind] for kind in ("stimuli", "subjects"))
    extra = spread["both"] - spread["stimuli"] - spread["subjects"]
    variance = stimuli + subjects - wider["stimuli"] * wider["subjects"] * extra
    return min(max(variance, stimuli, subjects), max(spread["both"], stimuli, subjects))


class _Trial:
    """Models, subjects and folds, to be run on any sample of stimuli and subjects."""

    def __init__(
        self, models: list[Model], subjects: Tensor, compare: str, folds: tuple[int | None, int | None], seed: int
    ) -> None:
        self.models, self.subjects, self.compare, self.folds = models, subjects, compare, folds
        random = np.random.default_rng(seed)
        self.places = random.permutation(subjects.shape[1]), random.permutation(len(subjects))
        self.fixed = [k for k, model in enumerate(models) if model.fit == "fixed"]
        self.fitted = [k for k, model in enumerate(models) if model.fit != "fixed"]
        self.known = torch.cat([subjects, *(torch.from_numpy(models[k].rdms.matrices) for k in self.fixed)])
        self.order, self.vectors = np.empty(0, int), dict[bytes, Tensor]()  # of the last sample of stimuli

    def run(self, order: Array, counts: Array) -> tuple[Array, float, float]:
        """(models, distinct subjects), and the lower and upper ceiling, for drawn stimuli and counts of subjects."""
        people = counts.nonzero()[0]
        weights = torch.from_numpy(counts[people]).double()
        none = np.full((len(self.models), len(people)), np.nan), math.nan, math.nan
        if any(
            len(set(drawn)) < (folds or 1) * least
            for drawn, folds, least in ((order, self.folds[0], LEAST), (people, self.folds[1], 1))
        ):
            return none
        if not np.array_equal(order, self.order):
            self.order, self.vectors = order, {}
        values, ceilings = [], []
        for train, test in _folds(order, self.folds[0], self.places[0]):
            if (key := test.tobytes()) not in self.vectors:
                self.vectors[key] = _vectors(self.known, test, self.compare)
            vectors, fixed = self.vectors[key][people], self.vectors[key][len(self.subjects) :]
            value = none[0].copy()
            value[self.fixed] = _similarities(fixed, vectors, self.compare)
            for others, tested in _folds(people, self.folds[1], self.places[1]) if self.fitted else ():
                teachers = self.subjects[np.repeat(others, counts[others])]
                predicted = torch.stack([_predict(self.models[k], teachers, train, self.compare) for k in self.fitted])
                made = _vectors(predicted, test, self.compare)
                mine = np.searchsorted(people, tested)
                value[np.array(self.fitted)[:, None], mine] = _similarities(made, vectors[mine], self.compare)
            values.append(value)
            ceilings.append(_ceiling(vectors, weights, self.compare) if len(people) > 1 else (math.nan,) * 2)
        lower, upper = np.mean(np.array(ceilings, float), 0)
        return np.mean(values, 0), float(lower), float(upper)


def _folds(drawn: Array, count: int | None, places: Array) -> Iterator[tuple[Array, Array]]:
    """What to train and to test on; all copies of a thing are in one fold."""
    if count is None:
        yield drawn, drawn
        return
    different = np.unique(drawn)
    for part in np.array_split(different[np.argsort(places[different])], count):
        tested = np.isin(drawn, part)
        yield drawn[~tested], drawn[tested]


# Vectors of one sample of stimuli. Their inner products are the similarity, but for Kendall's τ


def _linear(matrices: Tensor, order: Array, compare: str) -> Tensor:
    """(RDMs, entries) of drawn stimuli, without pairs of copies, as the comparator prepares them but for its scale."""
    n = len(order)
    i, j = np.triu_indices(n, 1)
    kept = torch.from_numpy(order[i] != order[j])
    values = matrices[:, order[i], order[j]]
    if compare.endswith("pearson"):
        values = values - values[:, kept].mean(1, keepdim=True)
    if compare.startswith("whitened"):
        return whitened(_without_copies(values, kept), n)
    values = values[:, kept]
    return values if compare in KENDALL else COMPARATORS[compare](values, n)


def _without_copies(values: Tensor, kept: Tensor) -> Tensor:
    """Dissimilarities of the pairs that are not kept so chosen that they add nothing to d V⁻¹ d.

    The whitened product is then that of the other pairs alone, by their own covariance. The inverse of V is
    (1 − s/n + 2/n²) / 2 for pairs that share s rows (the 1 for a pair with itself only).
    """
    if bool(kept.all()):
        return values
    n = (1 + round((1 + 8 * len(kept)) ** 0.5)) // 2
    i, j = torch.triu_indices(n, n, 1)
    values = torch.where(kept, values, 0)
    sums = row_sums(values, i, j, n)
    a, b = i[~kept], j[~kept]
    shared = sum((one[:, None] == other).double() for one in (a, b) for other in (a, b))
    inverse = torch.eye(len(a), dtype=values.dtype) - shared / n + 2 / n**2
    pull = sums.sum(1, keepdim=True) / n**2 - (sums[:, a] + sums[:, b]) / n
    values[:, ~kept] = torch.linalg.solve(inverse, -pull.T).T
    return values


def _vectors(matrices: Tensor, order: Array, compare: str) -> Tensor:
    return _scaled(_linear(matrices, order, compare), compare)


def _scaled(vectors: Tensor, compare: str) -> Tensor:
    """As `to_length`, but NaN where there is no similarity, which a draw may have."""
    if compare in KENDALL:
        return vectors
    lengths, entries = vectors.norm(dim=1, keepdim=True), vectors.shape[1]
    unit = vectors / torch.where(lengths > 0, lengths, torch.nan)
    return unit * lengths * (12 / (entries**3 - entries)) ** 0.5 if compare == "rho_a" else unit


def _again(pooled: Tensor, compare: str) -> Tensor:
    """A mean of vectors as a vector: means of ranks are ranked, others only scaled."""
    return _scaled(COMPARATORS[compare](pooled, 0) if compare in ("spearman", "rho_a") else pooled, compare)


def _similarities(vectors: Tensor, others: Tensor, compare: str) -> Array:
    """(vectors, others)"""
    if compare in KENDALL:
        found = [_kendall(compare, one, other) for one in vectors for other in others]
        return np.array(found).reshape(len(vectors), len(others))
    return (vectors @ others.T).numpy()


def _kendall(compare: str, one: Tensor, other: Tensor) -> float:
    flat = bool((one == one[0]).all() | (other == other[0]).all())
    return math.nan if flat else float(kendall(compare, one, other))


def _ceiling(vectors: Tensor, counts: Tensor, compare: str) -> tuple[float, float]:
    """The lower and upper noise ceiling of subjects that count several times; all copies are left out together."""
    each = COMPARATORS["spearman"](vectors, 0) if compare in KENDALL else vectors
    everyone = (counts @ each)[None]
    rest = everyone - counts[:, None] * each
    others = _again(rest, compare)
    upper = _similarities(_again(everyone, compare), vectors, compare)[0]
    if compare in KENDALL:
        lower = np.array([_kendall(compare, one, other) for one, other in zip(vectors, others, strict=True)])
    else:
        lower = (vectors * others).sum(1).numpy()
    sizes = counts * each.norm(dim=1)
    lower[(rest.norm(dim=1) < CANCELLED * (sizes.sum() - sizes)).numpy()] = 0
    upper[(everyone.norm(dim=1) < CANCELLED * sizes.sum()).expand(len(upper)).numpy()] = 0
    return float(np.average(lower, weights=counts)), float(np.average(upper, weights=counts))


# Fits


def _predict(model: Model, teachers: Tensor, train: Array, compare: str) -> Tensor:
    """(n, n): the model's dissimilarities of all stimuli, fitted to the training stimuli of these subjects."""
    return torch.from_numpy(np.tensordot(_weights(model, teachers, train, compare), model.rdms.matrices, 1))


def _weights(model: Model, subjects: Tensor, train: Array, compare: str) -> Array:
    parts = torch.from_numpy(model.rdms.matrices)
    if model.fit == "weighted":
        linear = compare if compare in ("cosine", "whitened_cosine", "whitened_pearson") else "pearson"
        target = _vectors(subjects, train, linear).mean(0)
        weights = nnls(_linear(parts, train, linear).T.numpy(), target.numpy())[0]
        if weights.any():
            return weights
    vectors = _vectors(parts, train, compare), _vectors(subjects, train, compare)
    fits = _similarities(*vectors, compare).mean(1)
    fits[np.isnan(fits)] = -np.inf  # an RDM that is constant over the drawn stimuli is not selected
    return np.eye(len(parts))[int(np.argmax(fits))]
