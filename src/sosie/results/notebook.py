"""How results show themselves in a notebook: small tables, in which all names are escaped."""

from __future__ import annotations

from html import escape

from .comparison import Comparison, by_chance, doubts
from .dynamics import Dynamics
from .summary import MEAN_EMBEDDING, sites_least_first, summarise
from .tables import MOST_SHOWN, html_table

REST = "rows() or write_report"


def as_html(comparison: Comparison) -> str:
    """A sentence and a table for each measure; of transfer scores one table for all."""
    if comparison.kind == "transfer":
        return _scores(comparison)
    parts = []
    for measure, values in comparison.values.items():
        summary, chance = summarise(comparison, measure), by_chance(values)
        sites, others = comparison.side_a.sites, comparison.side_b.sites
        titles = [comparison.side_a.name, "same depth", "best match", *doubts(values, 0, None)]
        rows, faded = [], set()
        for i, site in enumerate(sites[:MOST_SHOWN]):
            partner = summary.best_partner[i]
            best = "" if partner is None else f"{others[partner]} {summary.best[i]:.3f}"
            depth = f"{others[summary.depth_partner[i]]} {summary.diagonal[i]:.3f}"
            rows.append([site, depth, best, *doubts(values, i, partner).values()])
            if chance is not None and partner is not None and chance[i, partner]:
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
    """A table for each measure: when each site settles; of two runs, how alike their last states are."""
    parts = []
    for measure in dynamics.values:
        titles, columns = dynamics.summary_columns(measure)
        table = html_table([dynamics.name_a, *titles], list(zip(dynamics.sites, *columns, strict=True)), see=REST)
        parts.append(f"<p>{escape(measure)} to the last state</p>{table}")
    return "".join(parts)
