"""A summary of a matrix of values: a few numbers and one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .comparison import (
    LEVEL,
    WHOLE,
    Comparison,
    Estimate,
    by_chance,
    closest,
    correction,
    distinguishable,
    layers_of,
    mean,
    same_depth,
)
from .storage import Array

# Results of stitching: some values are about the stitched networks, others are indices of the layers

STITCHED = ("relative_accuracy", "accuracy", "agreement_b", "agreement_a", "cross_entropy")


def headline(comparison: Comparison) -> str | None:
    """The main value of stitched networks; None for other kinds of results."""
    if comparison.kind != "stitching":
        return None
    return next(name for name in STITCHED if name in comparison.values and name != "accuracy")


def indices(comparison: Comparison) -> list[str]:
    """The measures of layers beside the values of stitched networks."""
    return [name for name in comparison.values if name not in STITCHED]


def in_order(comparison: Comparison) -> bool:
    """Whether several sites were paired one to one, in order, so that no other pair has a value."""
    count_a, count_b = len(comparison.side_a.sites), len(comparison.side_b.sites)
    if count_a != count_b or count_a < 2:
        return False
    beside = ~np.eye(count_a, dtype=bool)
    return all(bool(np.isnan(values.value[beside]).all()) for values in comparison.values.values())


# Transfer scores: how much a model has to adapt to data

MEAN_EMBEDDING = "mean_embedding"  # models and layers are ranked by it, smallest first
TRANSFER = {
    MEAN_EMBEDDING: "‖μ‖ = ‖E[g fᵀ]‖: how strongly the data pull at the model, all in one direction",
    "kernel_norm": "‖K‖ / N²: the norm of the kernel of features × gradients",
    "kernel_trace": "√(Tr K) / N: what ‖μ‖ would be of rows that pull in unrelated directions",
    "mean_over_norm": "‖μ‖ / (‖K‖ / N²)",
    "mean_over_trace": "‖μ‖ / (√(Tr K) / N)",
    "log_mean_over_norm": "log of ‖μ‖ / (‖K‖ / N²)",
}


def transfer_sentence(comparison: Comparison, measure: str) -> str:
    """A sentence on the sites with the least and the most to adapt, or the lowest and highest other score."""
    a, b = comparison.side_a, comparison.side_b
    column = comparison[measure].value[:, 0]
    if np.isnan(column).all():
        return f"{measure} of {a.name} on {b.name} is undefined everywhere."
    least, most = int(np.nanargmin(column)), int(np.nanargmax(column))
    if len(column) == 1:
        return f"{measure} of {a.sites[0]} of {a.name} on {b.name} is {column[0]:.3g}."
    low, high = (f"{a.sites[k]} ({column[k]:.3g})" for k in (least, most))
    if measure == MEAN_EMBEDDING:
        return f"On {b.name}, {a.name} has the least to adapt at {low} and the most at {high}, by {measure}."
    return f"By {measure}, {a.name} on {b.name} goes from {low} up to {high}."


def over_sites(comparison: Comparison, measure: str) -> float:
    """The mean of a score over the sites where it is defined; NaN if there are none."""
    column = comparison[measure].value[:, 0]
    return float("nan") if np.isnan(column).all() else float(np.nanmean(column))


def least_first(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The comparisons in order of their mean embedding, smallest mean over sites first."""
    return sorted(comparisons, key=lambda c: np.nan_to_num(over_sites(c, MEAN_EMBEDDING), nan=np.inf))


def sites_least_first(comparison: Comparison) -> list[int]:
    """The indices of the sites in order of their mean embedding, smallest first and undefined last."""
    return [int(k) for k in np.argsort(comparison[MEAN_EMBEDDING].value[:, 0], kind="stable")]


def transfer_sentence_of_all(comparisons: Iterable[Comparison], measure: str) -> str:
    """A sentence on the models with the least and the most to adapt, or the lowest and highest other score."""
    ranked = [c for c in least_first(comparisons) if np.isfinite(over_sites(c, measure))]
    if not ranked:
        return f"{measure} is undefined everywhere."
    datas = dict.fromkeys(c.side_b.name for c in ranked)
    alone = len(datas) == 1
    ranked.sort(key=lambda c: over_sites(c, measure))
    first, last = (c.side_a.name if alone else f"{c.side_a.name} on {c.side_b.name}" for c in (ranked[0], ranked[-1]))
    low, high = (f"{over_sites(c, measure):.3g}" for c in (ranked[0], ranked[-1]))
    where = f"On {next(iter(datas))}, " if alone else ""
    if low == high and len(ranked) > 1:
        return f"{where}all {len(ranked)} have the same {measure} ({low}, mean over layers)."
    if measure != MEAN_EMBEDDING:
        return f"{where}{measure} goes from {first} ({low}, mean over its layers) up to {last} ({high})."
    text = f"{where}{first} has the least to adapt ({measure} {low}, mean over its layers)"
    return f"{text}." if len(ranked) == 1 else f"{text}, {last} the most ({high})."


MANY = 6  # layers of B from which a best match one layer off counts as at the same depth


@dataclass(frozen=True)
class Summary:
    """The same-depth curve, the best-match curve, and a sentence or two.

    A site for the whole model is in the curves, but means and counts leave it out.
    """

    depth_partner: tuple[int, ...]  # for each site of A, the site of B at the same relative depth
    diagonal: Array  # values at that partner
    best_partner: tuple[int | None, ...]  # for each site of A, the closest site of B
    best: Array
    diagonal_mean: float | None  # None where every value is undefined
    best_mean: float | None
    sentence: str


def summarise(comparison: Comparison, measure: str) -> Summary:
    values = comparison[measure]
    count_a, layers = len(values.value), layers_of(comparison)[0]
    partner = _partners(comparison)
    diagonal = values.value[np.arange(count_a), list(partner)]
    best_partner = tuple(closest(values))
    best = np.array([np.nan if j is None else values.value[i, j] for i, j in enumerate(best_partner)])
    return Summary(
        depth_partner=partner,
        diagonal=diagonal,
        best_partner=best_partner,
        best=best,
        diagonal_mean=mean(diagonal[layers]),
        best_mean=mean(best[layers]),
        sentence=_sentence(comparison, measure, diagonal, best_partner, partner)
        + ("" if comparison.kind == "shifts" else _chance(values, {i: best_partner[i] for i in layers})),
    )


def _partners(comparison: Comparison) -> tuple[int, ...]:
    """The site of B at the same depth as each of A's; for the whole model, B's whole model if there is one."""
    rows, columns = layers_of(comparison)
    whole = [j for j, site in enumerate(comparison.side_b.sites) if site == WHOLE]
    other = (whole or [len(comparison.side_b.sites) - 1])[-1]
    partners = dict(zip(rows, (columns[q] for q in same_depth(len(rows), len(columns))), strict=True))
    return tuple(partners.get(i, other) for i in range(len(comparison.side_a.sites)))


def _sentence(
    comparison: Comparison,
    measure: str,
    diagonal: Array,
    best_partner: tuple[int | None, ...],
    partner: tuple[int, ...],
) -> str:
    if comparison.kind == "transfer":
        return transfer_sentence(comparison, measure)
    a, b = comparison.side_a, comparison.side_b
    shifted = comparison.kind == "shifts"
    everywhere = "under every shift" if shifted else "at every depth"
    if np.isnan(diagonal).all():
        if shifted:
            return f"{measure} is undefined under every shift."
        return f"{measure} is undefined for every layer of {a.name} at its own depth in {b.name}."
    values = comparison[measure]
    same = values.same is not None and (np.abs(diagonal - values.same) <= 1e-6).all()
    if same and (comparison.kind, measure) != ("outputs", "agreement"):
        return f"By {measure}, {a.name} and {b.name} are the same {everywhere} ({values.same:g})."
    if values.value.size == 1:
        if comparison.kind == "outputs" and measure == "agreement":
            return _agreement(comparison)
        chance = "" if values.null is None else f", chance gives {values.null.item():.3g}"
        toward = "higher" if values.closer == "up" else "lower"
        return f"By {measure}, {a.name} and {b.name} are at {diagonal[0]:.3g} ({toward} is more alike{chance})."
    unclear = by_chance(values)
    if unclear is not None and unclear[np.isfinite(values.value)].all():
        return f"By {measure}, nothing that {a.name} and {b.name} have in common is distinguishable from chance."
    sign = 1.0 if values.closer == "up" else -1.0
    layers, others = layers_of(comparison)
    if np.isnan(diagonal[layers]).all():  # only the whole model has a value
        layers = list(range(len(diagonal)))
    most, least = (layers[int(f(sign * diagonal[layers]))] for f in (np.nanargmax, np.nanargmin))
    high, low = two_decimals(diagonal[most]), two_decimals(diagonal[least])
    if measure in STITCHED and comparison.kind == "stitching":
        best, worst = (f"{b.sites[partner[k]]} on" for k in (most, least))
        if measure != headline(comparison):
            return f"By {measure}, best from {best} ({high}), worst from {worst} ({low})."
        return (
            f"With what {a.name} represents, {b.name} does its job best from {best} ({measure} {high}) and worst from "
            f"{worst} ({low})."
        )
    where = "under" if shifted else "at"
    if np.isfinite(diagonal[layers]).sum() > 1 and math.isclose(diagonal[most], diagonal[least], rel_tol=1e-6):
        return f"By {measure}, {a.name} and {b.name} are equally alike {everywhere} ({high})."
    text = (
        f"By {measure}, {a.name} and {b.name} are most alike {where} {a.sites[most]} ({high}) "
        f"and least alike {where} {a.sites[least]} ({low})"
    )
    if shifted or in_order(comparison):
        return f"{text}."
    slack = int(len(others) >= MANY)  # one up or down is near among many layers only
    pairs = [(p, partner[i]) for i in layers if (p := best_partner[i]) is not None]  # a layer may have no value
    aligned = sum(abs(p - q) <= slack for p, q in pairs)
    near = ", give or take one" if slack else ""
    return f"{text}; {aligned} of {len(pairs)} layers find their best match at the same depth{near}."


def _agreement(comparison: Comparison) -> str:
    """How often two models give the same answer, and with labels how often each is right."""
    a, b, values = comparison.side_a.name, comparison.side_b.name, comparison["agreement"]
    chance = "" if values.null is None else f" ({values.null.item():.1%} by chance)"
    text = f"{a} and {b} give the same answer for {values.value.item():.1%} of {values.n:,} inputs{chance}."
    right = comparison.provenance.get("accuracy")
    return text if right is None else f"{text} {a} is right for {right[0]:.1%}, {b} for {right[1]:.1%}."


def two_decimals(value: float) -> str:
    """The value with two decimals, or if it is large with three significant digits and a power of ten."""
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.3g}"


def _chance(values: Estimate, best_partner: dict[int, int | None]) -> str:
    """A sentence on how many best matches are distinguishable from chance; "" without p-values."""
    yes, no = distinguishable(values), by_chance(values)
    places = [(i, j) for i, j in best_partner.items() if j is not None]
    if yes is None or no is None:
        return ""
    clear, known = sum(bool(yes[p]) for p in places), sum(bool(yes[p] or no[p]) for p in places)
    if not known:
        return ""
    if values.value.size == 1:
        return f" It {'is' if clear else 'is not'} distinguishable from chance (p {'≤' if clear else '>'} {LEVEL:g})."
    count = f"{clear} of {known}" if clear else f"None of {known}"
    verb = "is" if clear == 1 else "are"
    return f" {count} best matches {verb} distinguishable from chance (p ≤ {LEVEL:g}, {correction(values)})."
