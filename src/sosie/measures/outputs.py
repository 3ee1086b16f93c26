"""Functional similarity: the similarity of the outputs of two models for the same inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..stats import Continuous, Differences, Distributions, MarkedPredictions, OutputSums, Predictions
from .define import define

# Facts that measures of classes share, unless a measure declares otherwise.
of_classes = functools.partial(
    define, reads=Predictions, bounds=(0, 1), closer="down", invariant={"scale"}, differentiable=False, cost="n classes"
)
of_marked_classes = functools.partial(of_classes, reads=MarkedPredictions, needs={"labels"})


@of_classes(share=True, closer="up", paper="klabunde2025", chance="Σ aₖ bₖ / n², with aₖ and bₖ predictions of class k")
def agreement(o: Predictions) -> Tensor:
    """Share of inputs for which both models predict the same class.

    Of several largest outputs the first counts. Its score, 0 at chance and 1 for the same model, is Cohen's kappa of
    the predictions.
    """
    return o.equal / o.n


@of_classes(share=True, paper="klabunde2025", chance="1 − Σ aₖ bₖ / n²")
def disagreement(o: Predictions) -> Tensor:
    """Share of inputs for which the models predict different classes: 1 − agreement."""
    return (o.n - o.equal) / o.n


@of_classes(share=True, paper="milanifard2016", chance="1 − Σ aₖ bₖ / n²")
def churn(o: Predictions) -> Tensor:
    """Share of predictions that change when model B replaces model A; equal to disagreement."""
    return (o.n - o.equal) / o.n


@of_marked_classes(share=True, symmetric=False, paper="milanifard2016", chance="accuracy of A × error rate of B")
def bad_churn(o: MarkedPredictions) -> Tensor:
    """Share of inputs that A gets right and B gets wrong.

    The share is of all inputs, not of those that A gets right or those that change.
    """
    return (o.right_a - o.both_right) / o.n


@of_marked_classes(paper="klabunde2023", chance="depends on both error rates and on the wrong classes predicted")
def min_max_normalised_disagreement(o: MarkedPredictions) -> Tensor:
    """Disagreement rescaled from the least (0) to the most (1) that the two error rates allow.

    (d − |e − f|) / (min(e + f, 1) − |e − f|) for error rates e and f, as in the paper. With two classes, two errors are
    the same answer, so that the most is 2 − e − f if e + f > 1, and the value cannot reach 1. Undefined if the error
    rates allow only one disagreement, as when one model makes no errors.
    """
    wrong_a, wrong_b = o.n - o.right_a, o.n - o.right_b
    least, most = (wrong_a - wrong_b).abs(), torch.minimum(wrong_a + wrong_b, o.n)
    if bool((most <= least).any()):
        raise ValueError("the error rates allow only one disagreement, as when one model makes no errors")
    return (o.n - o.equal - least) / (most - least)


@of_marked_classes(paper="klabunde2025", chance="the same: pairing does not enter")
def accuracy_difference(o: MarkedPredictions) -> Tensor:
    """Absolute difference of the two accuracies; 0 does not imply that the models make the same errors."""
    return (o.right_a - o.right_b).abs() / o.n


@of_marked_classes(bounds=(-1, 1), closer="up", paper="geirhos2020", chance="0")
def error_overlap(o: MarkedPredictions) -> Tensor:
    """Error consistency: Cohen's kappa of right and wrong, 0 for errors that coincide as often as by chance.

    The wrong class does not matter. Undefined if a model is always right, or always wrong.
    """
    always = [(right == 0) | (right == o.n) for right in (o.right_a, o.right_b)]
    if bool(torch.stack(always).any()):
        raise ValueError("a model is right about every input, or wrong about every one: no errors could coincide more")
    wrong_a, wrong_b = o.n - o.right_a, o.n - o.right_b
    alike = o.n - o.right_a - o.right_b + 2 * o.both_right
    expected = (o.right_a * o.right_b + wrong_a * wrong_b) / o.n
    return (alike - expected) / (o.n - expected)


@define(
    reads=Distributions,
    bounds=(0, 1),
    closer="down",
    invariant=set(),
    paper="lin1991",
    cost="n classes",
    chance="depends on the confidence of both models",
)
def jensen_shannon(o: Distributions) -> Tensor:
    """Jensen-Shannon divergence of the predicted distributions in bits (base 2), averaged over inputs.

    The divergence, not the distance, which is its root: scipy's `jensenshannon` returns the distance, in nats by
    default. Logits become probabilities by softmax.
    """
    return o.divergence / o.n


@define(
    reads=Differences,
    bounds=(0, None),
    closer="down",
    invariant=set(),
    paper="klabunde2025",
    cost="n d",
    chance="the root of both variances and the squared difference of the means",
)
def output_rmse(o: Differences) -> Tensor:
    """Root mean square difference of the two models' numbers, over inputs and outputs."""
    mean = o.squared / o.n
    differs = mean > 0
    # The slope of a root is infinite at 0.
    return torch.where(differs, torch.where(differs, mean, torch.ones_like(mean)).sqrt(), torch.zeros_like(mean))


@define(
    reads=Continuous,
    bounds=(-1, 1),
    closer="up",
    invariant={"stretch", "shift"},
    paper="pearson1895",
    cost="n d",
    chance="0",
)
def output_correlation(o: Continuous) -> Tensor:
    """Pearson's correlation of the two models' numbers, averaged over outputs.

    Undefined if an output of one model is the same for every input.
    """
    scale = o.xx * o.yy
    if bool((scale <= 0).any()):
        raise ValueError("an output of one model is the same for every input, so nothing correlates with it")
    return (o.xy / scale.sqrt()).mean(-1)


# Chance in closed form: the answers of a model are kept, and their order is shuffled
#
# For measures with labels, the inputs that a model gets right are shuffled; its accuracy is kept.


# Mean and standard deviation over all shuffles, and the share that is as close as the value, if known
OutputChance = tuple[float, float | None, float | None]


def chance_of(measure: str, sums: OutputSums) -> OutputChance | None:
    """The chance level of a measure by its name; None without a closed form, or with one input."""
    return CHANCE[measure](sums) if measure in CHANCE and sums.n > 1 else None


def _agreement(sums: OutputSums) -> OutputChance:
    assert sums.predicted is not None
    n = sums.n
    # Python's integers, since these sums of products pass 2⁵³ at 200,000 inputs.
    pairs = [(a, b) for a, b in zip(*(side.tolist() for side in sums.predicted), strict=True) if a and b]
    alike = sum(a * b for a, b in pairs)
    # Hoeffding 1951: the variance of Σ c(i, π(i)) is Σ of the doubly centred c, squared, over n − 1.
    scaled = n * n * alike - n * sum(a * b * (a + b) for a, b in pairs) + alike * alike
    return alike / n**2, (scaled / (n - 1)) ** 0.5 / n**2, None


def _disagreement(sums: OutputSums) -> OutputChance:
    mean, spread, p = _agreement(sums)
    return 1 - mean, spread, p


def _errors(sums: OutputSums) -> tuple[int, int, float, float]:
    """The numbers of inputs that A and B get right, the spread of the number that both do, and its p-value.

    The number that both get right is hypergeometric over shuffles; the p-value is Fisher's exact test.
    """
    from scipy.stats import hypergeom

    n, a, b, both = (int(sums.sums[name].sum()) for name in ("n", "right_a", "right_b", "both_right"))
    spread = (a * b * (n - a) * (n - b) / (n**2 * (n - 1))) ** 0.5
    return a, b, spread, float(hypergeom.sf(both - 1, n, a, b))


def _error_overlap(sums: OutputSums) -> OutputChance | None:
    n, (a, b, spread, p) = sums.n, _errors(sums)
    unexpected = n * n - a * b - (n - a) * (n - b)
    return (0.0, 2 * n * spread / unexpected, p) if unexpected else None


def _bad_churn(sums: OutputSums) -> OutputChance:
    n, (a, b, spread, p) = sums.n, _errors(sums)
    return a * (n - b) / n**2, spread / n, p


def _output_correlation(sums: OutputSums) -> OutputChance:
    # The spread for several outputs depends on their correlations, which are not in the sums.
    return 0.0, (sums.n - 1) ** -0.5 if sums.widths[0] == 1 else None, None


CHANCE: dict[str, Callable[[OutputSums], OutputChance | None]] = {
    "agreement": _agreement,
    "disagreement": _disagreement,
    "churn": _disagreement,
    "bad_churn": _bad_churn,
    "error_overlap": _error_overlap,
    "output_correlation": _output_correlation,
}
