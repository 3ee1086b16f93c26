"""Splits: moments of every fold of the rows, from which held-out predictions follow in closed form, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import whole_number
from ..data.draws import row_bits
from ..linalg import memo, once, self_product
from .moments import MomentMaker, MomentPart, Moments, MomentSide, part_of

FEWEST = 2  # rows of a fold
_APART = 0xF01D5 << 40  # keeps folds apart from other draws over rows


# Folds: which rows are held out together


def dealt_folds(index: Tensor, folds: int, seed: int) -> Tensor:
    """The fold of each global index: of every `folds` consecutive ones each is in another fold, in a seeded order.

    So folds are of equal size for any number of rows, and do not depend on batches.
    """
    members = (index // folds * folds)[:, None] + torch.arange(folds, device=index.device)
    return (row_bits(seed + _APART, members) < row_bits(seed + _APART, index)[:, None]).sum(1)


def read_labels(values: Any, name: str, n: int | None = None) -> np.ndarray[Any, Any]:
    """The labels (n,) of rows, all numbers or all text."""
    labels = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if labels.ndim != 1 or (n is not None and len(labels) != n):
        each = "input" if n is None else f"of {n} rows"
        raise ValueError(f"{name} must have one label for each {each}, got shape {labels.shape}")
    if len(kinds := {type(label).__name__ for label in labels.tolist()}) > 1 or (labels != labels).any():
        raise ValueError(f"{name} must be all numbers or all text, none missing, got {', '.join(sorted(kinds))}")
    return labels


def grouped_folds(groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """The fold of each row, with the rows of a group in one: the largest first, each into the smallest fold so far."""
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(sizes) < folds:
        raise ValueError(f"{len(sizes)} groups cannot be in {folds} folds: take fewer folds")
    by_chance = row_bits(seed + _APART, torch.arange(len(sizes))).numpy()
    fold_of_group, filled = np.empty(len(sizes), dtype=np.int64), np.zeros(folds, dtype=np.int64)
    for each in np.lexsort((by_chance, -sizes)):
        fold_of_group[each] = filled.argmin()
        filled[fold_of_group[each]] += sizes[each]
    return fold_of_group[group.reshape(-1)]


# The view


@dataclass
class SplitSide:
    """One site in every fold, with what is made of it once for all pairs."""

    counts: tuple[int, ...]  # (k,) rows
    means: tuple[Tensor, ...]  # (p,) each
    squares: tuple[Tensor, ...]  # (p, p) each: Σ x xᵀ about the mean of the fold

    @once
    def length(self) -> Tensor:
        """Σ ‖x − mean‖² over all rows."""
        _, mean = mean_of(self.counts, self.means)
        away = sum(n * (m - mean).square().sum() for n, m in zip(self.counts, self.means, strict=True))
        return torch.stack([square.trace() for square in self.squares]).sum() + away


@dataclass
class Splits:
    """The moments of one pair of sites in every fold: x in any rotation of its neurons, y neuron by neuron."""

    x: SplitSide
    y_means: tuple[Tensor, ...]  # (q,) each
    y_squares: tuple[Tensor, ...]  # (q,) each: Σ y² about the mean of the fold
    cross: tuple[Tensor, ...]  # (p, q) each: Σ x yᵀ about the means of the fold
    noise: Tensor | None = None  # (q,) variances of the noise in y, if they are known


def check_counts(counts: Sequence[int]) -> None:
    """Raise if a fold has too few rows."""
    for number, count in enumerate(counts):
        if count < FEWEST:
            raise ValueError(
                f"fold {number} of {len(counts)} has {count} of {sum(counts)} rows, and each needs at least {FEWEST}: "
                "take fewer folds, or more rows"
            )


def mean_of(counts: Sequence[int], means: Sequence[Tensor]) -> tuple[int, Tensor]:
    """The number of rows of some folds together, and their mean."""
    count = sum(counts)
    return count, torch.stack([n * mean for n, mean in zip(counts, means, strict=True)]).sum(0) / count


def splits_of(x: Tensor, y: Tensor, fold: Tensor, side: SplitSide, noise: Tensor | None = None) -> Splits:
    """The view of rows x (n, r) and y (n, q), from the fold of each; `side` is that of x."""
    x_parts, y_parts = (_parts(rows, fold, side.counts) for rows in (x, y))
    centred = [rows - rows.mean(0) for rows in y_parts]
    cross = tuple((a - mean).T @ b for a, mean, b in zip(x_parts, side.means, centred, strict=True))
    return Splits(
        side, tuple(rows.mean(0) for rows in y_parts), tuple(b.square().sum(0) for b in centred), cross, noise
    )


def split_side(x: Tensor, fold: Tensor, folds: int) -> SplitSide:
    """One site from its rows, and the fold of each."""
    counts = tuple(torch.bincount(fold, minlength=folds).tolist())
    check_counts(counts)
    parts = _parts(x, fold, counts)
    means = tuple(rows.mean(0) for rows in parts)
    return SplitSide(counts, means, tuple(self_product(rows - m) for rows, m in zip(parts, means, strict=True)))


def _parts(rows: Tensor, fold: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    return rows[fold.argsort(stable=True).to(rows.device)].split(list(counts))


# The statistic


@dataclass(frozen=True)
class SplitChunk:
    """All sites of one side for one chunk, in the folds that it has rows of."""

    folds: dict[int, MomentSide]
    of: tuple[int, int]  # folds, seed

    @property
    def check(self) -> Tensor:
        """(2, sites): see `MomentSide`."""
        return torch.stack([side.check for side in self.folds.values()]).sum(0)


class SplitMaker:
    """Makes the parts of one model, with the rows of every input in one fold: `fold_of` each, if that is given."""

    def __init__(self, folds: int, seed: int, per_input: int = 1, fold_of: Tensor | None = None) -> None:
        self.of, self.per_input, self.fold_of = (folds, seed), per_input, fold_of
        self.moments = MomentMaker()
        self.learnt = self.moments.learnt

    def part(self, site: str, rows: Tensor, start: int = 0) -> dict[int, MomentPart]:
        index = torch.arange(start, start + len(rows)) // self.per_input
        fold = dealt_folds(index, *self.of) if self.fold_of is None else self.fold_of[index]
        centre, rows, _ = self.moments.about_centre(site, rows)
        return {
            number: part_of(centre, rows[(fold == number).nonzero()[:, 0].to(rows.device)])
            for number in fold.unique().tolist()
        }

    def side(self, parts: Sequence[dict[int, MomentPart]], start: int = 0) -> SplitChunk:
        return SplitChunk({number: self.moments.side([part[number] for part in parts]) for number in parts[0]}, self.of)


@dataclass(frozen=True)
class SplitMoments:
    """Moments of all sites of two sides, by fold; `merge` adds other rows."""

    folds: dict[int, Moments]
    of: tuple[int, int]  # folds, seed

    exact = True  # no row is left out
    supplies = frozenset({Splits})

    @classmethod
    def join(cls, a: SplitChunk, b: SplitChunk) -> SplitMoments:
        return cls({number: Moments.join(side, b.folds[number]) for number, side in a.folds.items()}, a.of)

    def merge(self, other: SplitMoments) -> SplitMoments:
        if self.of != other.of:
            raise ValueError(f"these moments are of other folds: (folds, seed) {self.of} and {other.of}")
        both = dict(self.folds)
        for number, part in other.folds.items():
            both[number] = both[number].merge(part) if number in both else part
        return SplitMoments(both, self.of)

    @property
    def n(self) -> int:
        return sum(moments.n for moments in self.folds.values())

    @once
    def total(self) -> Moments:
        """The moments of all rows."""
        first, *rest = (self.folds[number] for number in sorted(self.folds))
        for part in rest:
            first = first.merge(part)
        return first

    def describe(self) -> str:
        return f"moments of all {self.n} rows in {self.of[0]} folds"

    def splits(self, i: int = 0, j: int = 0) -> Splits:
        """The view of site i of A and site j of B."""
        counts = tuple(self.folds[k].n if k in self.folds else 0 for k in range(self.of[0]))
        check_counts(counts)
        joint = [self.folds[number].joint(i, j) for number in range(self.of[0])]
        side = memo(
            self,
            i,
            lambda: SplitSide(counts, tuple(m.mean_a for m in joint), tuple(m.n * m.cov_aa for m in joint)),
        )
        y_squares = tuple(m.n * m.cov_bb.diagonal() for m in joint)
        cross = tuple(m.n * m.cov_ab for m in joint)
        return Splits(side, tuple(m.mean_b for m in joint), y_squares, cross)


def check_folds(folds: int, seed: int) -> None:
    whole_number(folds, "folds", least=2)
    whole_number(seed, "the seed of the folds", least=0, most=2**32 - 1)
