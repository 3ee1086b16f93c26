"""How well one side predicts the other on rows that the prediction was not fitted on."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..checks import one_of, positive, whole_number
from ..linalg import (
    RANK_TOLERANCE,
    cholesky,
    cross_product,
    eigen,
    for_numpy,
    gram_factor,
    memo,
    once,
    product,
    self_product,
)
from ..stats import Splits
from ..stats.splits import mean_of
from .define import define

STRENGTHS = tuple(10 ** (k / 2) for k in range(-18, 1))  # penalties that are tried: shares of Σ ‖x − mean‖²
ROUNDING = 1e-20  # of y's variance: a fold with less does not vary
FITS = ("ridge", "linear", "pls")
SCORES = ("r2", "pearson", "explained_variance")


@define(
    reads=Splits,
    bounds=(None, 1),
    closer="up",
    invariant={"rotation", "scale", "shift"},
    symmetric=False,
    differentiable=False,
    precise=True,
    paper="yamins2014, schrimpf2018",
    cost="k (n p (p + q) + k p² (p + q)), k = folds",
    chance="0 or below",
    with_options={
        "score": {"invariant": frozenset({"permutation", "scale", "shift"})},
        "fit": {"same": None},
        "strength": {"same": None},
    },
)
def predictivity(
    s: Splits,
    fit: str = "ridge",
    score: str = "r2",
    folds: int = 5,
    seed: int = 0,
    strength: float | None = None,
    components: int = 25,
) -> Tensor:
    """Share of y's variance that a regression on x explains on held-out rows, averaged over folds.

    `fit`: "ridge", "linear" (the shortest solution) or "pls" (partial least squares of so many `components`, fewer if x
    has fewer directions). The penalty of a ridge is `strength` × Σ ‖x − mean‖²; without one, each training set chooses
    among 19, from 1e-9 to 1, the one with the least squared error when each of its own folds is held out in turn.

    `score`: "r2", 1 − Σ‖y − ŷ‖² / Σ‖y − mean‖² over all neurons, which weighs them by variance; "explained_variance",
    the same without the error of the mean; "pearson", the median over neurons of the correlation of y and ŷ (0 for a
    neuron that does not vary). Of every `folds` consecutive rows each is in another fold, by `seed`; all rows of an
    input are in one, and with `groups` all inputs of a group. `sosie.measure` also takes a `split`, and `repetitions`
    of y, by which the score is divided by what noise leaves of it. scikit-learn's cross_val_score of RidgeCV with these
    folds and penalties.
    """
    one_of(fit, "fit", FITS)
    one_of(score, "score", SCORES)
    count = len(s.x.counts)
    if fit == "ridge" and strength is None and count < 3:
        raise ValueError(
            f"ridge chooses its penalty by holding out folds of the training rows, so needs at least 3 folds, got "
            f"{count}: take more, or give a strength"
        )
    training = functools.cache(lambda *held: _Training(s, held))
    values = []
    for held in range(count):
        train = training(held)
        if fit == "ridge":
            chosen = _strength(s, held, training) if strength is None else positive(strength, "strength")
            weight = train.ridge(chosen * s.x.length)
        elif fit == "linear":
            weight = train.least_squares()
        else:
            weight = train.partial_least_squares(whole_number(components, "components", least=1))
        values.append(_SCORED[score](s, held, train, weight))
    scores = torch.stack(values).mean(0)
    if s.noise is None:
        return scores.quantile(0.5)
    total = _total(s)
    signal = total - sum(s.x.counts) * s.noise
    if not bool(signal.sum() > 0):
        raise ValueError("the repetitions of y differ as much as its rows: noise leaves nothing to predict")
    if score == "pearson":
        clean = signal > 0
        return (scores[clean] * (total[clean] / signal[clean]).sqrt()).quantile(0.5)
    return scores * total.sum() / signal.sum()


def _total(s: Splits) -> Tensor:
    """(q,) Σ y² of each neuron over all rows, about its mean."""
    _, mean = mean_of(s.x.counts, s.y_means)
    away = [n * (each - mean).square() for n, each in zip(s.x.counts, s.y_means, strict=True)]
    return torch.stack([*s.y_squares, *away]).sum(0)


class _Training:
    """The moments of the rows outside some folds, about their means."""

    def __init__(self, s: Splits, held: tuple[int, ...]) -> None:
        folds = [k for k in range(len(s.x.counts)) if k not in held]
        counts = [s.x.counts[k] for k in folds]
        self.s, self.held, self.folds = s, held, folds
        self.n, self.mean_x = mean_of(counts, [s.x.means[k] for k in folds])
        _, self.mean_y = mean_of(counts, [s.y_means[k] for k in folds])
        cross = torch.stack([s.cross[k] for k in folds]).sum(0)
        for k, n in zip(folds, counts, strict=True):
            cross = torch.addr(cross, s.x.means[k] - self.mean_x, s.y_means[k] - self.mean_y, alpha=n)
        self.raw = cross  # (p, q)

    @property
    def total(self) -> Tensor:
        """(p, p) Σ x xᵀ."""
        x = self.s.x
        total = torch.stack([x.squares[k] for k in self.folds]).sum(0)
        for k in self.folds:
            total = torch.addr(total, x.means[k] - self.mean_x, x.means[k] - self.mean_x, alpha=x.counts[k])
        return total

    @once
    def _components(self) -> tuple[Tensor, Tensor]:
        return memo(self.s.x, ("components", self.held), lambda: _components(self.total, self.n))

    @property
    def values(self) -> Tensor:
        """(k,) The eigenvalues of Σ x xᵀ, ascending; of rows fewer than p only those that can be above 0."""
        return self._components[0]

    @property
    def vectors(self) -> Tensor:
        """(p, k) The principal components of x."""
        return self._components[1]

    @once
    def cross(self) -> Tensor:
        """(k, q) Σ x yᵀ, with x by its principal components."""
        return cross_product(self.vectors, self.raw)

    def ridge(self, penalty: Tensor) -> Tensor:
        """The weights (p, q), as all that follow."""
        regular = self.total
        if bool(penalty < RANK_TOLERANCE * regular.trace()):  # too small for the digits of a Cholesky factor
            return product(self.vectors, self.cross / (self.values + penalty)[:, None])
        regular.diagonal().add_(penalty)
        return torch.cholesky_solve(self.raw, cholesky(regular))

    def least_squares(self) -> Tensor:
        kept = self.values > RANK_TOLERANCE * self.values[-1]
        return product(self.vectors[:, kept], self.cross[kept] / self.values[kept, None])

    def partial_least_squares(self, components: int) -> Tensor:
        """PLS2 from cross products (Dayal and MacGregor 1997, Journal of Chemometrics 11)."""
        cross = self.cross
        rotations: list[Tensor] = []
        loadings: list[Tensor] = []
        weights: list[Tensor] = []
        wide = cross.shape[0] < cross.shape[1]
        for _ in range(components):
            values, vectors = eigen(cross @ cross.T if wide else cross.T @ cross)
            if not bool(values[-1] > 0):
                break
            direction = vectors[:, -1] if wide else cross @ vectors[:, -1]
            rotation = direction = direction / direction.norm()
            for before, loading in zip(rotations, loadings, strict=True):
                rotation = rotation - (loading @ direction) * before
            scores = self.values * rotation
            size = rotation @ scores
            if not bool(size > RANK_TOLERANCE * self.values[-1] * rotation.square().sum()):
                break
            loading, weight = scores / size, (cross.T @ rotation) / size
            cross = cross - size * torch.outer(loading, weight)
            rotations.append(rotation)
            loadings.append(loading)
            weights.append(weight)
        if not weights:
            return torch.zeros_like(self.raw)
        return product(self.vectors, product(torch.stack(rotations, 1), torch.stack(weights)))

    def gaps(self, fold: int) -> tuple[Tensor, Tensor]:
        """The means of a fold less those of the training rows."""
        return self.s.x.means[fold] - self.mean_x, self.s.y_means[fold] - self.mean_y

    def square(self, fold: int) -> Tensor:
        """(k, k) Σ x xᵀ of a fold about its mean, by principal components."""
        return memo(
            self.s.x,
            ("square", self.held, fold),
            lambda: product(cross_product(self.vectors, self.s.x.squares[fold]), self.vectors),
        )


def _components(total: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of Σ x xᵀ of n rows about their mean; those of 0 are left out."""
    if n > len(total) or not for_numpy(total):
        values, vectors = eigen(total)
        return values.clamp_min(0), vectors  # below 0 by rounding
    factor = gram_factor(total)
    values, vectors = eigen(self_product(factor))
    kept = values > 0
    return values[kept], product(factor, vectors[:, kept] / values[kept].sqrt())


def _strength(s: Splits, held: int, training: Callable[..., _Training]) -> float:
    """The penalty with the least squared error when each fold of the training rows is held out in turn."""
    penalties = s.x.length * torch.tensor(STRENGTHS, dtype=torch.float64).to(s.x.length)
    errors = torch.zeros_like(penalties)
    for inner in set(range(len(s.x.counts))) - {held}:
        train = training(min(held, inner), max(held, inner))
        gap_x, gap_y = train.gaps(inner)
        gap_x = train.vectors.T @ gap_x
        n = s.x.counts[inner]
        # Σ‖y − ŷ‖² for all penalties at once: a quadratic form in the shrinkage of each component.
        shrunk = 1 / (train.values + penalties[:, None])  # (strengths, p)
        square = torch.addr(train.square(inner), gap_x, gap_x, alpha=n) * (train.cross @ train.cross.T)
        cross = torch.addr(cross_product(train.vectors, s.cross[inner]), gap_x, gap_y, alpha=n) * train.cross
        error = ((shrunk @ square) * shrunk).sum(1) - 2 * shrunk @ cross.sum(1)
        errors += (error + s.y_squares[inner].sum() + n * gap_y.square().sum()) / n
    return STRENGTHS[int(errors.argmin())]


def _sums(s: Splits, held: int, train: _Training, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q,) Σ y², Σ ŷ² and Σ y ŷ of each neuron over a held-out fold, about its means."""
    predicted = (product(s.x.squares[held], weight) * weight).sum(0)
    return s.y_squares[held], predicted, (s.cross[held] * weight).sum(0)


def _explained_variance(s: Splits, held: int, train: _Training, weight: Tensor) -> Tensor:
    own, predicted, shared = _sums(s, held, train, weight)
    return 1 - (own - 2 * shared + predicted).sum() / _varying(s, held)


def _r2(s: Splits, held: int, train: _Training, weight: Tensor) -> Tensor:
    own, predicted, shared = _sums(s, held, train, weight)
    gap_x, gap_y = train.gaps(held)
    missed = s.x.counts[held] * (gap_y - gap_x @ weight).square()
    return 1 - (own - 2 * shared + predicted + missed).sum() / _varying(s, held)


def _pearson(s: Splits, held: int, train: _Training, weight: Tensor) -> Tensor:
    own, predicted, shared = _sums(s, held, train, weight)
    sizes = (own * predicted.clamp_min(0)).sqrt()
    return shared / torch.where(sizes > 0, sizes, torch.inf)


def _varying(s: Splits, held: int) -> Tensor:
    total = s.y_squares[held].sum()
    if not bool(total > ROUNDING * _total(s).sum()):
        raise ValueError(f"y does not vary over the rows of fold {held}: take fewer folds, or other groups")
    return total


_SCORED: dict[str, Callable[[Splits, int, _Training, Tensor], Tensor]] = {
    "r2": _r2,
    "explained_variance": _explained_variance,
    "pearson": _pearson,
}
