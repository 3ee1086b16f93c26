"""Results of transfer scores: how much a model has to adapt to data, and how that is put in words."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .comparison import Comparison

MEAN_EMBEDDING = "mean_embedding"  # what models and layers are ranked by, the smallest first
TRANSFER = {
    MEAN_EMBEDDING: "‖μ‖ = ‖E[g fᵀ]‖: how strongly the data pull at the model, all in one direction",
    "kernel_norm": "‖K‖ / N²: the norm of the kernel of features × gradients",
    "kernel_trace": "√(Tr K) / N: what ‖μ‖ would be of rows that pull in unrelated directions",
    "mean_over_norm": "‖μ‖ / (‖K‖ / N²)",
    "mean_over_trace": "‖μ‖ / (√(Tr K) / N)",
    "log_mean_over_norm": "log of ‖μ‖ / (‖K‖ / N²)",
}


def is_transfer(comparison: Comparison) -> bool:
    """Whether these are a model's transfer scores on data, rather than two models side by side."""
    return {MEAN_EMBEDDING, "kernel_norm"} <= set(comparison.values)


def transfer_sentence(comparison: Comparison, measure: str) -> str:
    """Where there is least to adapt, and where most; other scores from the lowest to the highest."""
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
    """The mean of a score over the sites where it is defined; NaN where there is none."""
    column = comparison[measure].value[:, 0]
    return float("nan") if np.isnan(column).all() else float(np.nanmean(column))


def least_first(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """By the mean embedding, the smallest mean over sites first."""
    return sorted(comparisons, key=lambda c: np.nan_to_num(over_sites(c, MEAN_EMBEDDING), nan=np.inf))


def sites_least_first(comparison: Comparison) -> list[int]:
    """Where the sites are, by the mean embedding, the smallest first; undefined ones last."""
    return [int(k) for k in np.argsort(comparison[MEAN_EMBEDDING].value[:, 0], kind="stable")]


def transfer_sentence_of_all(comparisons: Iterable[Comparison], measure: str) -> str:
    """Which model has least to adapt, and which most; of other scores the lowest and the highest."""
    found = [c for c in least_first(comparisons) if np.isfinite(over_sites(c, measure))]
    if not found:
        return f"{measure} is undefined everywhere."
    datas = dict.fromkeys(c.side_b.name for c in found)
    alone = len(datas) == 1
    found.sort(key=lambda c: over_sites(c, measure))
    first, last = (c.side_a.name if alone else f"{c.side_a.name} on {c.side_b.name}" for c in (found[0], found[-1]))
    low, high = (f"{over_sites(c, measure):.3g}" for c in (found[0], found[-1]))
    where = f"On {next(iter(datas))}, " if alone else ""
    if low == high and len(found) > 1:
        return f"{where}all {len(found)} have the same {measure} ({low}, mean over layers)."
    if measure != MEAN_EMBEDDING:
        return f"{where}{measure} goes from {first} ({low}, mean over its layers) up to {last} ({high})."
    text = f"{where}{first} has the least to adapt ({measure} {low}, mean over its layers)"
    return f"{text}." if len(found) == 1 else f"{text}, {last} the most ({high})."
