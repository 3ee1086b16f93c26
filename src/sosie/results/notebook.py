"""How a comparison shows itself in a notebook: a small table for each measure, all names escaped."""

from __future__ import annotations

from html import escape

from .comparison import Comparison, Estimate, by_chance, decisive_p, stars, written_p
from .dynamics import THRESHOLDS, Dynamics
from .summary import MEAN_EMBEDDING, sites_least_first, summarise
from .tables import MOST_SHOWN, html_table

REST = "rows() or write_report"


def as_html(comparison: Comparison) -> str:
    if comparison.kind == "transfer":
        return _scores(comparison)
    parts = []
    for measure in comparison.values:
        summary = summarise(comparison, measure)
        values, sites, others = comparison[measure], comparison.side_a.sites, comparison.side_b.sites
        titles = [comparison.side_a.name, "same depth", "best match", *_uncertainty_titles(values)]
        rows, faded = [], set()
        for i, site in enumerate(sites[:MOST_SHOWN]):
            partner = summary.best_partner[i]
            best = "" if partner is None else f"{others[partner]} {summary.best[i]:.3f}"
            depth = f"{others[summary.depth_partner[i]]} {summary.diagonal[i]:.3f}"
            rows.append([site, depth, best, *_uncertainty(values, i, partner)])
            if _by_chance(values, i, partner):
                faded.add(i)
        table = html_table(titles, rows, of=len(sites), see=REST, faded=faded)
        parts.append(f"<p>{escape(summary.sentence)}</p>{table}")
    return "".join(parts)


def _scores(comparison: Comparison) -> str:
    """Transfer scores: a row for each layer, the one with least to adapt first, a column for each score."""
    order = sites_least_first(comparison)
    titles = [comparison.side_a.name, *comparison.values]
    rows = [
        [comparison.side_a.sites[k], *(f"{values.value[k, 0]:.3g}" for values in comparison.values.values())]
        for k in order[:MOST_SHOWN]
    ]
    sentence = summarise(comparison, MEAN_EMBEDDING).sentence
    return f"<p>{escape(sentence)}</p>{html_table(titles, rows, of=len(order), see=REST)}"


def dynamics_as_html(dynamics: Dynamics) -> str:
    """A small table for each measure: when each site settles; of two runs, how alike their last states are."""
    parts = []
    for measure in dynamics.values:
        ends = dynamics.to_end(measure)
        if dynamics.two_runs:
            titles, columns = ["first", "last"], [[f"{v:.3f}" for v in ends[:, k]] for k in (0, -1)]
        else:
            titles = ["first", *(f"settled at {threshold:g}" for threshold in THRESHOLDS)]
            steps = [dynamics.settled(threshold, measure).values() for threshold in THRESHOLDS]
            columns = [
                [f"{v:.3f}" for v in ends[:, 0]],
                *(["never" if s is None else str(s) for s in c] for c in steps),
            ]
        rows = list(zip(dynamics.sites, *columns, strict=True))
        table = html_table([dynamics.name_a, *titles], rows, see=REST)
        parts.append(f"<p>{escape(measure)} to the last state</p>{table}")
    return "".join(parts)


def _uncertainty_titles(values: Estimate) -> list[str]:
    ranged = ["95 % interval"] if values.low is not None and values.high is not None else []
    chance = ["chance"] if values.null is not None else []
    return [*ranged, *chance, *(["p"] if decisive_p(values) is not None else [])]


def _uncertainty(values: Estimate, i: int, j: int | None) -> list[str]:
    """The best match's interval, what chance gives, and p, in the order of the titles."""
    cells = []
    if values.low is not None and values.high is not None:
        cells.append("" if j is None else f"{values.low[i, j]:.3f} to {values.high[i, j]:.3f}")
    if values.null is not None:
        spread = "" if j is None or values.null_spread is None else f" ± {values.null_spread[i, j]:.3f}"
        cells.append("" if j is None else f"{values.null[i, j]:.3f}{spread}")
    p = decisive_p(values)
    if p is not None:
        cells.append("" if j is None else f"{written_p(p[i, j])} {stars(p[i, j])}")
    return cells


def _by_chance(values: Estimate, i: int, j: int | None) -> bool:
    chance = by_chance(values)
    return chance is not None and j is not None and bool(chance[i, j])
