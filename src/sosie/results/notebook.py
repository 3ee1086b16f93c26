"""How a comparison shows itself in a notebook: a small table a measure, all names escaped."""

from __future__ import annotations

from html import escape

from .comparison import Comparison
from .summary import summarise

MOST_ROWS = 40


def as_html(comparison: Comparison) -> str:
    parts = []
    for measure in comparison.values:
        found = summarise(comparison, measure)
        rows = []
        for i, site in enumerate(comparison.side_a.sites[:MOST_ROWS]):
            partner = found.best_partner[i]
            best = "" if partner is None else f"{escape(comparison.side_b.sites[partner])} {found.best[i]:.3f}"
            depth = escape(comparison.side_b.sites[found.depth_partner[i]])
            rows.append(f"<tr><td>{escape(site)}</td><td>{depth} {found.diagonal[i]:.3f}</td><td>{best}</td></tr>")
        hidden = len(comparison.side_a.sites) - MOST_ROWS
        if hidden > 0:
            rows.append(f"<tr><td colspan=3>and {hidden} more: see rows() or write_report</td></tr>")
        parts.append(
            f"<p>{escape(found.sentence)}</p><table><thead><tr><th>{escape(comparison.side_a.name)}</th>"
            f"<th>same depth</th><th>best match</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )
    return "".join(parts)
