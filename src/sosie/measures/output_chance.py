"""What shuffled pairing gives, in closed form: a model's answers kept, their order lost.

For measures with labels the order that is lost is which inputs a model gets right; its accuracy is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..stats import OutputSums


@dataclass(frozen=True)
class OutputChance:
    """Mean and standard deviation over all shuffles; how often one is as close as what was seen, if known."""

    mean: float
    spread: float | None
    p: float | None = None


def chance_of(measure: str, sums: OutputSums) -> OutputChance | None:
    """The chance level of a measure by its name; None where no closed form is known, or there is one input."""
    return CHANCE[measure](sums) if measure in CHANCE and sums.n > 1 else None


def _agreement(sums: OutputSums) -> OutputChance:
    assert sums.predicted is not None
    n = sums.n
    # Python's integers: these sums of products pass 2⁵³ at 200,000 inputs.
    pairs = [(a, b) for a, b in zip(*(side.tolist() for side in sums.predicted), strict=True) if a and b]
    alike = sum(a * b for a, b in pairs)
    # Hoeffding 1951: the variance of Σ c(i, π(i)) is Σ of the doubly centred c, squared, over n − 1.
    scaled = n * n * alike - n * sum(a * b * (a + b) for a, b in pairs) + alike * alike
    return OutputChance(alike / n**2, (scaled / (n - 1)) ** 0.5 / n**2)


def _disagreement(sums: OutputSums) -> OutputChance:
    found = _agreement(sums)
    return OutputChance(1 - found.mean, found.spread)


@dataclass(frozen=True)
class _Errors:
    """How many inputs both get right is hypergeometric once it is lost which inputs those are."""

    n: int
    right_a: int
    right_b: int
    both: int

    @classmethod
    def of(cls, sums: OutputSums) -> _Errors:
        a, b, both = (int(sums.sums[name].sum()) for name in ("right_a", "right_b", "both_right"))
        return cls(sums.n, a, b, both)

    @property
    def spread(self) -> float:
        product = self.right_a * self.right_b * (self.n - self.right_a) * (self.n - self.right_b)
        return (product / (self.n**2 * (self.n - 1))) ** 0.5

    @property
    def p(self) -> float:
        """How often at least as many are right by both: Fisher's exact test."""
        from scipy.stats import hypergeom

        return float(hypergeom.sf(self.both - 1, self.n, self.right_a, self.right_b))


def _error_overlap(sums: OutputSums) -> OutputChance | None:
    errors = _Errors.of(sums)
    n, wrong_a, wrong_b = errors.n, errors.n - errors.right_a, errors.n - errors.right_b
    unexpected = n * n - errors.right_a * errors.right_b - wrong_a * wrong_b
    return OutputChance(0.0, 2 * n * errors.spread / unexpected, errors.p) if unexpected else None


def _bad_churn(sums: OutputSums) -> OutputChance:
    errors = _Errors.of(sums)
    return OutputChance(errors.right_a * (errors.n - errors.right_b) / errors.n**2, errors.spread / errors.n, errors.p)


def _output_correlation(sums: OutputSums) -> OutputChance:
    # Several outputs are correlated with each other, and the spread of their mean is not in the sums.
    return OutputChance(0.0, (sums.n - 1) ** -0.5 if sums.widths[0] == 1 else None)


CHANCE: dict[str, Callable[[OutputSums], OutputChance | None]] = {
    "agreement": _agreement,
    "disagreement": _disagreement,
    "churn": _disagreement,
    "bad_churn": _bad_churn,
    "error_overlap": _error_overlap,
    "output_correlation": _output_correlation,
}
