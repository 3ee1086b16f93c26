"""What transfer scores of one site are made of: sums over all rows, and over pairs of a few of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...linalg import product
from ...stats import Pairs, SiteSketch, mean_squared

_Z = 1.959964  # of a 95 % interval
_BLOCK = 1024  # rows whose products are held at a time


@dataclass(frozen=True)
class Score:
    """A number, and the standard error of its logarithm from sampling or sketching; 0 where all rows were summed up."""

    value: float
    error: float = 0.0
    logarithm: bool = False

    @property
    def low(self) -> float:
        return self._edge(-1)

    @property
    def high(self) -> float:
        return self._edge(1)

    def _edge(self, sign: int) -> float:
        reach = sign * _Z * self.error
        return self.value + reach if self.logarithm else self.value * math.exp(reach)

    def over(self, other: Score) -> Score:
        """Their ratio; undefined where the other is 0. Their errors are independent."""
        if other.value == 0:
            return Score(math.nan)
        return Score(self.value / other.value, math.hypot(self.error, other.error))


@dataclass(frozen=True)
class Scores:
    """All scores of one site."""

    mean_embedding: Score
    kernel_norm: Score
    kernel_trace: Score
    by_chance: bool  # the mean embedding is what rows would give that pull in unrelated directions
    sampled: int | None  # rows that pairs were taken of; None: all
    columns: int | None  # of the sketches of f ⊗ g that the mean embedding is of; None: of the rows themselves
    folded: int | None  # columns that rows were projected to before pairs were taken

    @property
    def mean_over_norm(self) -> Score:
        return self.mean_embedding.over(self.kernel_norm)

    @property
    def mean_over_trace(self) -> Score:
        return self.mean_embedding.over(self.kernel_trace)

    @property
    def log_mean_over_norm(self) -> Score:
        ratio = self.mean_over_norm
        return Score(math.log(ratio.value) if ratio.value > 0 else math.nan, ratio.error, logarithm=True)


def scores_of(site: SiteSketch, n: int, *, exact: bool, label: str) -> Scores:
    """The scores of one site from the sketch of its n rows; `exact`: all rows are there."""
    if site.pairs is None or site.fourth is None or site.trace is None:
        raise ValueError(
            f"{label}: this sketch has no gradients, which transfer scores are of; make it with kernels='hadamard'"
        )
    trace, fourth = float(site.trace), float(site.fourth)
    columns = sampled = folded = None
    if exact and site.features is not None and site.gradients is not None:
        total, squares = _all_pairs(site.features.rows, site.gradients.rows)
        squares_error = 0.0
        mean = Score(math.sqrt(max(total, 0.0)) / n)  # a sum that is 0 may come out below it by rounding
        if site.moment is not None:
            mean = Score(float(site.moment.norm()) / n)
    else:
        beside, spread = _sampled_pairs(site.pairs, n, label)
        squares = fourth + beside
        squares_error = spread / squares if squares > 0 else 0.0
        mean, columns = _mean_embedding(site, n, label)
        sampled = len(site.pairs.index) if len(site.pairs.index) < n else None
        width = site.pairs.features.shape[1]
        folded = width if width < site.width else None
    norm = Score(math.sqrt(squares) / n**2, squares_error / 2)
    # With signs at random ‖Σψ‖² is Tr K on average, with a variance of twice the squares beside the diagonal.
    by_chance = (mean.value * n) ** 2 <= trace + 2 * math.sqrt(2 * max(squares - fourth, 0.0))
    return Scores(mean, norm, Score(math.sqrt(trace) / n), by_chance, sampled, columns, folded)


def _mean_embedding(site: SiteSketch, n: int, label: str) -> tuple[Score, int | None]:
    """‖E[g fᵀ]‖: of the sum of g fᵀ where it was kept, else of its sketches."""
    if site.moment is not None and len(site.moment) == site.width:
        return Score(float(site.moment.norm()) / n), None
    if site.hadamard is None:
        raise ValueError(
            f"{label}: {site.width} neurons are too many for the sum of g fᵀ to be kept whole, and there is no sketch "
            "of it: make the sketch with kernels='hadamard' among others"
        )
    copies, columns = site.hadamard.total.shape
    # The variance of ‖·‖² of one sketch is 2 / columns for a μ of high rank, and up to four times that for rank one.
    return Score(float(mean_squared(site.hadamard, n).sqrt()), math.sqrt(8 / (copies * columns)) / 2), columns


def _sampled_pairs(pairs: Pairs, n: int, label: str) -> tuple[float, float]:
    """Σ K_ij² over i ≠ j of all n rows, from the sampled rows, and its standard error by leaving one row out.

    Drawn without replacement: the error is less by √(1 − m/n), and nothing where all rows were drawn.
    """
    count = len(pairs.index)
    if n == 1:
        return 0.0, 0.0
    if count < min(n, 3):
        raise ValueError(f"{label}: {count} rows are too few to take pairs of, need 3 at least")
    f, g = pairs.features.double(), pairs.gradients.double()
    squares = (product(f, f.T) * product(g, g.T)).square().fill_diagonal_(0)
    of_row = squares.sum(1)
    every = n * (n - 1) * of_row.sum() / (count * (count - 1))
    if count == n:
        return float(every), 0.0
    without = n * (n - 1) * (of_row.sum() - 2 * of_row) / ((count - 1) * (count - 2))
    variance = (count - 1) / count * (without - without.mean()).square().sum() * (1 - count / n)
    return float(every), float(variance.sqrt())


def _all_pairs(f: Tensor, g: Tensor) -> tuple[float, float]:
    """The sums of K_ij and of K_ij² over all rows."""
    total = squares = torch.zeros((), dtype=torch.float64, device=f.device)
    f, g = f.double(), g.double()
    for start in range(0, len(f), _BLOCK):
        kernel = product(f[start : start + _BLOCK], f.T) * product(g[start : start + _BLOCK], g.T)
        total, squares = total + kernel.sum(), squares + kernel.square().sum()
    return float(total), float(squares)
