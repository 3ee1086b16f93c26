"""Standard errors: from groups of rows left out in turn, or from halves and quarters of the rows.

A delete-one-group jackknife counts what k rows do together k times (Efron and Stein, 1981, Annals of Statistics 9).
That is nothing to speak of for CKA, but twice the variance for canonical correlations and lists of neighbours.

Two halves have no row in common: half their squared difference is on average exactly the variance with half the rows
(balanced half-samples: McCarthy, 1969, Review of the International Statistical Institute 37). Quarters give the
variance with a quarter of them. With a / n + b / n² as its law, that with all rows follows from the two.

Where a few rows weigh much, the standard error is itself uncertain, and the value skewed. Both show in what single
groups do to the value: kurtosis takes degrees of freedom away, skewness makes the interval longer on one side.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

ROUNDING = 1e-6  # of a value: halves that differ by less are as good as equal
HALVED = 32  # groups of rows that halves and quarters are made of: a power of two

Array = np.ndarray


@dataclass(frozen=True)
class Error:
    """Standard errors, the degrees of freedom that they were estimated with, and the skewness of the value."""

    size: Array
    freedom: Array
    skewness: Array

    @classmethod
    def of(cls, variance: Array, freedom: float, effects: Array) -> Error:
        """`freedom` is what there is for a Gaussian; `effects` (groups, …): by how much each group raises the value.

        The variance of a variance is 2 / freedom for a Gaussian, and kurtosis / groups more in general (Satterthwaite,
        1946, Biometrics Bulletin 2).
        """
        count = len(effects)
        squares = np.square(effects)  # np.power would take ten times as long
        second, third, fourth = squares.mean(0), (squares * effects).mean(0), np.square(squares).mean(0)
        varies = second > 0  # groups that all do the same have no tails
        with np.errstate(divide="ignore", invalid="ignore"):
            kurtosis = (count + 1) * np.where(varies, fourth / second**2, 0) - 3 * (count - 1)
            skewness = np.where(varies, third / second**1.5, 0)
        kurtosis *= (count - 1) / ((count - 2) * (count - 3))  # the estimate without bias (Joanes and Gill, 1998)
        return cls(np.sqrt(variance), 2 / (2 / freedom + np.maximum(kurtosis, 0) / count), skewness / count**0.5)

    def reach(self, confidence: float) -> tuple[Array, Array]:
        """How far the interval goes down and up: Student's t, and more on the side that the value is skewed to.

        Johnson (1978, Journal of the American Statistical Association 73) shifts the interval by as much. With few
        groups that takes too much away on the other side, so nothing is taken away.
        """
        even = student(self.freedom, confidence) * self.size
        shift = (1 + 2 * student(np.inf, confidence) ** 2) / 6 * self.skewness * self.size
        return even + np.maximum(-shift, 0), even + np.maximum(shift, 0)

    def where(self, holds: Array, other: Error) -> Error:
        """These errors where something holds, elsewhere the others."""
        return Error(*(np.where(holds, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def student(freedom: Array | float, confidence: float) -> Array:
    """How many standard errors an interval goes to either side."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(freedom, (1 + confidence) / 2))


def by_jackknife(left: Array) -> Error:
    """From the values with each group left out (groups, …)."""
    count = len(left)
    effects = left.mean(0) - left
    return Error.of((count - 1) / count * np.square(effects).sum(0), count - 1, effects)


def by_halves(halves: Array, quarters: Array) -> tuple[Error, Array]:
    """From the values of `halves()` (31, 2, …) and `quarters()` (13, 4, …); and where they can be relied on.

    They cannot where quarters differ less than halves, or halves not at all: there the measure saturates with so few
    rows, as canonical correlations do with fewer rows than neurons. Nor where it has no value for so few.
    """
    of_half, of_quarter = (values.var(1, ddof=1).mean(0) for values in (halves, quarters))
    # Each over its rows, as if variances fell with the rows alone: a / n + 2 b / n², and a / n + 4 b / n².
    from_half, from_quarter = of_half / 2, of_quarter / 4
    # An a below 0 is no variance: where quarters ask for one, all is b.
    variance = np.maximum(1.5 * from_half - 0.5 * from_quarter, from_half / 2)
    # The ways to halve are orthogonal, so that their differences give back what each group does.
    signs = np.where(halves_of_groups()[:, 0], 1, -1)
    effects = np.tensordot(signs, halves[:, 0] - halves[:, 1], (0, 0)) / HALVED
    # The two errors add up as if they were independent: 1.5² + 0.5² times the variance of one.
    error = Error.of(variance, len(halves) / 2.5, effects)
    return error, (of_quarter > of_half) & (np.sqrt(of_half) > ROUNDING * np.abs(halves).mean((0, 1)))


def halves_of_groups() -> Array:
    """(31, 2, groups): which groups are in each half, in all the ways that are orthogonal to one another.

    Half-sample u has the groups that have an odd number of bits in common with u: the rows of a Hadamard matrix. So
    the differences of a mean are as many independent contrasts, and its variance is that of the groups' means.
    """
    odd = np.stack([_odd(u) for u in range(1, HALVED)])
    return np.stack([odd, ~odd], axis=1)


def quarters_of_groups() -> Array:
    """(13, 4, groups): which groups are in each quarter, made of two ways to halve and thereby of a third.

    Every way to halve is in one of them at least, and none in more than it must.
    """
    found = []
    uses = np.zeros(HALVED, dtype=int)
    while 0 in uses[1:]:
        u = 1 + int(np.argmin(uses[1:]))
        v = min((v for v in range(1, HALVED) if v != u), key=lambda v: (uses[v] + uses[u ^ v], v))
        uses[[u, v, u ^ v]] += 1
        a, b = _odd(u), _odd(v)
        found.append([a & b, a & ~b, ~a & b, ~a & ~b])
    return np.array(found)


def _odd(u: int) -> Array:
    return np.array([(u & group).bit_count() % 2 == 1 for group in range(HALVED)])
