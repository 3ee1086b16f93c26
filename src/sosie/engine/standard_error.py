"""Standard errors: from groups of rows left out in turn, or from halves and quarters of the rows.

A delete-one-group jackknife counts what k rows do together k times (Efron and Stein, 1981, Annals of Statistics 9).
That is nothing to speak of for CKA, but twice the variance for canonical correlations and lists of neighbours.

Two halves have no row in common: half their squared difference is on average exactly the variance with half the rows
(balanced half-samples: McCarthy, 1969, Review of the International Statistical Institute 37). Quarters give the
variance with a quarter of them. With a / n + b / n² as its law, that with all rows follows from the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDING = 1e-6  # of a value: halves that differ by less are as good as equal
HALVED = 32  # groups of rows that halves and quarters are made of: a power of two

Array = np.ndarray


@dataclass(frozen=True)
class Error:
    """Standard errors, and the degrees of freedom that they were estimated with."""

    size: Array
    freedom: Array | float

    def reach(self, confidence: float) -> Array:
        """How far the interval goes to either side: Student's t."""
        from scipy.special import stdtrit

        return np.asarray(stdtrit(self.freedom, (1 + confidence) / 2) * self.size)

    def where(self, holds: Array, other: Error) -> Error:
        """These errors where something holds, elsewhere the others."""
        return Error(np.where(holds, self.size, other.size), np.where(holds, self.freedom, other.freedom))


def by_jackknife(left: Array) -> Error:
    """From the values with each group left out (groups, …)."""
    count = len(left)
    return Error(np.sqrt((count - 1) / count * np.square(left - left.mean(0)).sum(0)), count - 1)


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
    # The two errors add up as if they were independent: 1.5² + 0.5² times the variance of one.
    error = Error(np.sqrt(variance), len(halves) / 2.5)
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
