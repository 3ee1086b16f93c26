"""How a comparison shows itself in a notebook: a small table a measure, all names escaped."""

from __future__ import annotations

from html import escape

from .chance import by_chance, decisive_p, stars, written_p
from .comparison import Comparison, Values
from .dynamics import THRESHOLDS, Dynamics
from .summary import summarise
from .transfer import MEAN_EMBEDDING, is_transfer, sites_least_first

MOST_ROWS = 40


def as_html(comparison: Comparison) -> str:
    if is_transfer(comparison):
        return _scores(comparison)
    parts = []
    for measure in comparison.values:
        found = summarise(comparison, measure)
        titles = [escape(comparison.side_a.name), "same depth", "best match", *_doubt_titles(comparison[measure])]
        rows = []
        for i, site in enumerate(comparison.side_a.sites[:MOST_ROWS]):
            partner = found.best_partner[i]
            best = "" if partner is None else f"{escape(comparison.side_b.sites[partner])} {found.best[i]:.3f}"
            depth = escape(comparison.side_b.sites[found.depth_partner[i]])
            cells = [escape(site), f"{depth} {found.diagonal[i]:.3f}", best, *_doubt(comparison[measure], i, partner)]
            rows.append(f"<tr{_faded(comparison[measure], i, partner)}><td>{'</td><td>'.join(cells)}</td></tr>")
        hidden = len(comparison.side_a.sites) - MOST_ROWS
        if hidden > 0:
            rows.append(f"<tr><td colspan={len(titles)}>and {hidden} more: see rows() or write_report</td></tr>")
        parts.append(
            f"<p>{escape(found.sentence)}</p><table><thead><tr><th>{'</th><th>'.join(titles)}</th></tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table>"
        )
    return "".join(parts)


def _scores(comparison: Comparison) -> str:
    """Transfer scores: a row for each layer, the one with least to adapt first, a column for each score."""
    order = sites_least_first(comparison)
    titles = [comparison.side_a.name, *comparison.values]
    rows = [
        [comparison.side_a.sites[k], *(f"{values.value[k, 0]:.3g}" for values in comparison.values.values())]
        for k in order[:MOST_ROWS]
    ]
    if len(order) > MOST_ROWS:
        rows.append([f"and {len(order) - MOST_ROWS} more: see rows() or write_report"])
    body = "".join(f"<tr><td>{'</td><td>'.join(map(escape, row))}</td></tr>" for row in rows)
    return (
        f"<p>{escape(summarise(comparison, MEAN_EMBEDDING).sentence)}</p><table><thead><tr>"
        f"<th>{'</th><th>'.join(map(escape, titles))}</th></tr></thead><tbody>{body}</tbody></table>"
    )


def dynamics_as_html(found: Dynamics) -> str:
    """A small table a measure: when each site settles; of two runs, how alike their last states are."""
    parts = []
    for measure in found.values:
        ends = found.to_end(measure)
        if found.two_runs:
            titles, columns = ["first", "last"], [[f"{v:.3f}" for v in ends[:, k]] for k in (0, -1)]
        else:
            titles = ["first", *(f"settled at {threshold:g}" for threshold in THRESHOLDS)]
            steps = [found.settled(threshold, measure).values() for threshold in THRESHOLDS]
            columns = [[f"{v:.3f}" for v in ends[:, 0]], *(["never" if s is None else str(s) for s in c] for c in steps)]
        rows = list(zip(found.sites, *columns, strict=True))[:MOST_ROWS]
        if len(found.sites) > MOST_ROWS:
            rows.append((f"and {len(found.sites) - MOST_ROWS} more: see rows() or write_report",))
        body = "".join(f"<tr><td>{'</td><td>'.join(map(escape, row))}</td></tr>" for row in rows)
        heads = "</th><th>".join(map(escape, (found.name_a, *titles)))
        parts.append(f"<p>{escape(measure)} to the last state</p><table><thead><tr><th>{heads}</th></tr></thead>"
                     f"<tbody>{body}</tbody></table>")  # fmt: skip
    return "".join(parts)


def _doubt_titles(values: Values) -> list[str]:
    ranged = ["95 % interval"] if values.low is not None and values.high is not None else []
    chance = ["chance"] if values.null is not None else []
    return [*ranged, *chance, *(["p"] if decisive_p(values) is not None else [])]


def _doubt(values: Values, i: int, j: int | None) -> list[str]:
    """The best match's interval, what chance gives, and p, in the order of the titles."""
    cells = []
    if values.low is not None and values.high is not None:
        cells.append("" if j is None else f"{values.low[i, j]:.3f} to {values.high[i, j]:.3f}")
    if values.null is not None:
        spread = "" if j is None or values.null_spread is None else f" ± {values.null_spread[i, j]:.3f}"
        cells.append("" if j is None else f"{values.null[i, j]:.3f}{spread}")
    p = decisive_p(values)
    if p is not None:
        cells.append("" if j is None else escape(f"{written_p(p[i, j])} {stars(p[i, j])}"))
    return cells


def _faded(values: Values, i: int, j: int | None) -> str:
    chance = by_chance(values)
    return "" if chance is None or j is None or not chance[i, j] else ' style="opacity:0.6"'
