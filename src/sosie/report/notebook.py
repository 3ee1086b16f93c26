"""Results in a notebook: sentences, heat maps and curves as inline SVG without scripts, legible on light and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

import numpy as np

from ..results import (
    MEAN_EMBEDDING,
    Comparison,
    Comparisons,
    Dynamics,
    Estimate,
    by_chance,
    doubts,
    in_order,
    number,
    sites_least_first,
    summarise,
)
from ..results.tables import MOST_SHOWN, html_table
from .colour import RAMP, Scale, data_scale, full_scale
from .comparison import ONE_PAIR, between_models, one_pair, sentence, sentence_of_all, shared_measures
from .words import direction, in_a_sentence, shorten, visible

MOST_FIGURES = 4  # measures, or pairs of models, that are drawn
MOST_CELLS = 120  # rows or columns of a map; of more sites, every second, third … is drawn
MOST_LABELS = 24
FAR = 2.5  # chance is not drawn if it makes the axis of the curves this many times as long
WITH_TIPS = 400  # cells that say their value when pointed at; more would make notebooks large
_WIDTH = 300
_SAME_DEPTH, _BEST_MATCH, _CHANCE = "#5b8fd9", "#d9793f", "#8a8f9c"
_TEXT = 'fill="currentColor" font-size="10" font-family="sans-serif"'


def html_of(result: Comparison | Comparisons | Dynamics) -> str:
    """The result as HTML in which every name is escaped."""
    if isinstance(result, Comparison):
        html = _pair(result)
    else:
        html = _models(result) if isinstance(result, Comparisons) else _dynamics(result)
    return html.encode("utf-8", "replace").decode()  # half characters cannot be saved with a notebook


def _pair(result: Comparison) -> str:
    if result.values and result.kind != "transfer" and len(result.sites_a) == len(result.sites_b) == 1:
        text, rows = one_pair(result)
        return f"<p>{escape(text)}</p>{html_table(ONE_PAIR, rows)}"
    tables = _tables(result)
    if result.kind == "transfer":
        return tables
    parts = []
    for measure in result.measures[:MOST_FIGURES]:
        curve = _curve(result, measure)
        figures = [curve] if in_order(result) or result.kind == "shifts" else [_map_of(result, measure), curve]
        parts.append(f"<p>{escape(sentence(result, measure))}</p>{_side_by_side(figures)}")
    return "".join(parts) + _folded("tables", tables)


def _models(result: Comparisons) -> str:
    parts = []
    measures = shared_measures(result)
    names = [visible(name) for name in result.names]
    for measure in measures[:MOST_FIGURES]:
        parts.append(f"<p>{escape(sentence_of_all(result, measure))}</p>")
        if result.kind != "transfer":
            values = between_models(result, measure)
            parts.append(_heatmap(values.value, full_scale(values), names, names, "", visible(measure)))
    if result.kind == "transfer" or not measures:
        every = "".join(_tables(pair) for pair in result)
        return "".join(parts) + _folded("each model", every) if every else "<p>Nothing was compared.</p>"
    maps = [
        f"<div><div>{escape(in_a_sentence(f'{pair.side_a.name} × {pair.side_b.name}'))}</div>"
        f"{_map_of(pair, measures[0], labels=False)}</div>"
        for pair, _ in zip(result, range(MOST_FIGURES), strict=False)
        if max(len(pair.sites_a), len(pair.sites_b)) > 1
    ]
    left = len(result) - len(maps)
    more = f"<p>and {left:,} more pairs: pairs[i, j] shows one</p>" if maps and left > 0 else ""
    return "".join(parts) + (_folded("each pair", _side_by_side(maps) + more) if maps else "")


def _dynamics(result: Dynamics) -> str:
    """A map of time × time for the first and the last site of each measure, and the table."""
    parts = []
    for measure, values in list(result.values.items())[:MOST_FIGURES]:
        scale = full_scale(values)
        times_a, times_b = ([f"{step}" for step in steps] for steps in (result.steps_a, result.steps_b))
        maps = [
            f"<div><div>{escape(in_a_sentence(result.sites[k]))}, time × time</div>"
            f"{_heatmap(values.value[k], scale, times_a, times_b, '', visible(measure), size=160)}</div>"
            for k in dict.fromkeys((0, len(result.sites) // 2, len(result.sites) - 1))
        ]
        parts.append(f"<p>{escape(measure)}</p>{_side_by_side(maps)}")
    return "".join(parts) + _tables_of_times(result)


def _side_by_side(figures: Sequence[str]) -> str:
    return f'<div style="display:flex;flex-wrap:wrap;gap:16px;align-items:flex-start">{"".join(figures)}</div>'


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


# The heat map


def _map_of(result: Comparison, measure: str, *, labels: bool = True) -> str:
    values = result[measure]
    rows, columns = ([visible(site) for site in sites] for sites in (result.sites_a, result.sites_b))
    title = f"{visible(measure)} at every pair of layers"
    chance = by_chance(values)
    scale, size = full_scale(values), _WIDTH if labels else 120
    a, b = in_a_sentence(result.side_a.name), in_a_sentence(result.side_b.name)
    note = f"rows: {a}, columns: {b}; {direction(values.closer)}"
    return _heatmap(values.value, scale, rows, columns, note, title, chance, size=size, labels=labels)


def _heatmap(
    value: np.ndarray,
    scale: Scale,
    rows: Sequence[str],
    columns: Sequence[str],
    note: str,
    title: str,
    chance: np.ndarray | None = None,
    *,
    size: int = _WIDTH,
    labels: bool = True,
) -> str:
    """A map with the first row at the top; bright is alike, cells that chance may give are faded."""
    steps = [-(-max(len(names), 1) // MOST_CELLS) for names in (rows, columns)]
    value = value[:: steps[0], :: steps[1]]
    chance = None if chance is None else chance[:: steps[0], :: steps[1]]
    rows, columns = rows[:: steps[0]], columns[:: steps[1]]
    cell = max(min(size / max(len(rows), len(columns), 1), 26), 2)
    left = 8 + 6 * max(map(len, map(_label, rows))) if labels else 0
    width, height = cell * len(columns), cell * len(rows)
    below = 12 + (4 * max(map(len, map(_label, columns))) if labels else 0)
    share = np.clip((value - scale.far) / (scale.alike - scale.far), 0, 1)
    colour = np.where(np.isfinite(share), np.round(np.nan_to_num(share) * (len(RAMP) - 1)), -1).astype(int)
    faded = np.zeros(value.shape, bool) if chance is None else chance
    shapes = []
    for k, hue in enumerate(RAMP):
        for fade in (False, True):
            cells = np.argwhere((colour == k) & (faded == fade))
            if len(cells):
                way = "".join(f"M{j} {i}h1v1h-1z" for i, j in cells)
                opacity = ' fill-opacity=".35"' if fade else ""
                shapes.append(f'<path d="{way}" fill="{hue}"{opacity}/>')
    tips = "".join(_tips(value, rows, columns)) if value.size <= WITH_TIPS else ""
    grid = (
        f'<g transform="translate({left} 0) scale({cell:g})" shape-rendering="crispEdges">{"".join(shapes)}{tips}</g>'
    )
    frame = f'<rect x="{left}" width="{width:g}" height="{height:g}" fill="none" stroke="currentColor" opacity=".4"/>'
    texts = [] if not labels else [*_row_labels(rows, left, cell), *_column_labels(columns, left, cell, height)]
    bar = _bar(scale, left, height + below) if labels else ""
    whole = height + below + (32 if labels else 6)
    words = [note] if note else []
    if faded.any():
        words.append("faded: not distinguishable from chance")
    if max(steps) > 1:
        words.append(f"one in {max(steps)} sites is drawn")
    said = f"<div><small>{escape('; '.join(words))}</small></div>" if words and labels else ""
    all_width = left + max(width, 150 if labels else 0) + 60 * labels
    return (
        f'<div><svg xmlns="http://www.w3.org/2000/svg" role="img" width="{all_width:.0f}" height="{whole:.0f}" '
        f'viewBox="0 -4 {all_width:.0f} {whole:.0f}"><title>{escape(title)}</title>{grid}{frame}{"".join(texts)}{bar}'
        f"</svg>{said}</div>"
    )


def _label(name: str) -> str:
    return shorten(name, 20)


def _tips(value: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
    for (i, j), each in np.ndenumerate(value):
        text = f"{shorten(rows[i], 60)}, {shorten(columns[j], 60)}: {number(float(each))}"
        place = f'x="{j}" y="{i}" width="1" height="1" fill="none" pointer-events="all"'
        yield f"<rect {place}><title>{escape(text)}</title></rect>"


def _row_labels(rows: Sequence[str], left: float, cell: float) -> Iterator[str]:
    step = _step(len(rows), cell)
    for k in range(0, len(rows), step):
        y = (k + 0.5) * cell + 3
        yield f'<text x="{left - 4}" y="{y:g}" text-anchor="end" {_TEXT}>{escape(_label(rows[k]))}</text>'


def _column_labels(columns: Sequence[str], left: float, cell: float, height: float) -> Iterator[str]:
    step = _step(len(columns), cell * 0.64)  # sin 40°: the labels are turned
    for k in range(0, len(columns), step):
        place = f"{left + (k + 0.5) * cell:g} {height + 10:g}"
        turned = f'transform="translate({place}) rotate(40)"'
        yield f'<text {turned} text-anchor="start" {_TEXT}>{escape(_label(columns[k]))}</text>'


def _step(count: int, cell: float) -> int:
    """Every k-th label, so that none touches the next and there are not too many."""
    return max(-(-count // MOST_LABELS), int(np.ceil(11 / cell)))


def _bar(scale: Scale, left: float, top: float) -> str:
    """The colours from unlike to alike with the values at both ends."""
    swatches = "".join(
        f'<rect x="{left + 4 * k:g}" y="{top:g}" width="4.5" height="8" fill="{hue}"/>' for k, hue in enumerate(RAMP)
    )
    ends = ((left, "start", scale.far), (left + 4 * len(RAMP), "end", scale.alike))
    texts = (
        f'<text x="{x:g}" y="{top + 20:g}" text-anchor="{anchor}" {_TEXT}>{escape(number(end))}</text>'
        for x, anchor, end in ends
    )
    return swatches + "".join(texts)


# The curves


def _curve(result: Comparison, measure: str) -> str:
    """Same depth and best match over the layers of A, with intervals and chance if known; up is more alike."""
    values, summary = result[measure], summarise(result, measure)
    at = np.arange(len(result.sites_a))
    depth = list(summary.depth_partner)
    best = [0 if j is None else j for j in summary.best_partner]
    lines = [("same depth", summary.diagonal, depth, _SAME_DEPTH, "")]
    if not (in_order(result) or result.kind == "shifts"):
        lines.append(("best match", summary.best, best, _BEST_MATCH, ' stroke-dasharray="5 3"'))
    chance = None if values.null is None else values.null[at, depth]
    low, high = _reach(values, lines, chance)
    least, most = _reach(values, lines, None)
    if far := high - low > FAR * (most - least):
        low, high = least, most
    left, top, width, height = 46, 18, _WIDTH, 150
    sign = 1 if values.closer == "up" else -1

    def place(k: int, value: float) -> str:
        x = left + width * (k / (len(at) - 1) if len(at) > 1 else 0.5)
        share = (value - low) / (high - low)
        return f"{x:.1f} {top + height * ((1 - share) if sign > 0 else share):.1f}"

    drawn, key = [], []
    for name, curve, partner, colour, dash in lines:
        if values.low is not None and values.high is not None:
            ends = [(k, values.low[k, j], values.high[k, j]) for k, j in enumerate(partner) if np.isfinite(curve[k])]
            ends = [(k, a, b) for k, a, b in ends if np.isfinite([a, b]).all()]
            if len(ends) > 1:
                corners = [place(k, b) for k, _, b in ends] + [place(k, a) for k, a, _ in reversed(ends)]
                drawn.append(f'<path d="M{"L".join(corners)}z" fill="{colour}" fill-opacity=".2"/>')
        drawn.append(_line(curve, place, colour, dash))
        key.append((name, colour))
    if chance is not None and not far:
        drawn.append(_line(chance, place, _CHANCE, ' stroke-dasharray="2 3"'))
    if chance is not None:
        key.append(("chance is far off" if far else "by chance", _CHANCE))
    axes = f'<path d="M{left} {top}v{height}h{width}" fill="none" stroke="currentColor" opacity=".5"/>'
    ticks = "".join(
        f'<text x="{left - 5}" y="{float(place(0, v).split()[1]) + 3:.1f}" text-anchor="end" {_TEXT}>'
        f"{escape(number(v, 2))}</text>"
        for v in (low, (low + high) / 2, high)
    )
    first, last = (_label(visible(result.sites_a[k])) for k in (0, -1))
    named = [(first, 0.0, "start"), (last, 1.0, "end")] if len(at) > 1 else [(first, 0.5, "middle")]
    names = "".join(
        f'<text x="{left + width * x}" y="{top + height + 14}" text-anchor="{anchor}" {_TEXT}>{escape(site)}</text>'
        for site, x, anchor in named
    )
    legend = "".join(
        f'<rect x="{left + 90 * k}" y="3" width="10" height="3" fill="{colour}"/>'
        f'<text x="{left + 90 * k + 14}" y="9" {_TEXT}>{name}</text>'
        for k, (name, colour) in enumerate(key)
    )
    whole_width, whole = left + width + 20, top + height + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{whole_width}" height="{whole}" '
        f'viewBox="0 0 {whole_width} {whole}"><title>{escape(visible(measure))} over layers</title>'
        f"{axes}{''.join(drawn)}{ticks}{names}{legend}</svg>"
    )


def _reach(
    values: Estimate, lines: Sequence[tuple[str, np.ndarray, list[int], str, str]], chance: np.ndarray | None
) -> tuple[float, float]:
    """The ends of the axis of values: those of the curves, their intervals and chance."""
    numbers = [curve for _, curve, *_ in lines] + ([] if chance is None else [chance])
    for _, _, partner, *_ in lines:
        at = (np.arange(len(partner)), partner)
        numbers += [end[at] for end in (values.low, values.high) if end is not None]
    every = np.concatenate(numbers)
    every = every[np.isfinite(every)]
    if not every.size:
        return 0.0, 1.0
    low, high = float(every.min()), float(every.max())
    if high - low <= 1e-6 * max(abs(low), abs(high), 1e-300):
        scale = data_scale(values)
        low, high = min(low, scale.far, scale.alike), max(high, scale.far, scale.alike)
    return low, high


def _line(curve: np.ndarray, place: Callable[[int, float], str], colour: str, dash: str) -> str:
    """A line through the defined values, broken where one is undefined; lone values are dots."""
    way, dots, down = "", "", False
    for k, value in enumerate(curve):
        if not np.isfinite(value):
            down = False
            continue
        way += f"{'L' if down else 'M'}{place(k, float(value))}"
        down = True
        if len(curve) <= 40:
            x, y = place(k, float(value)).split()
            dots += f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>'
    return f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>{dots}' if way else ""


# Small tables, in which all names are escaped

REST = "rows() or write_report"


def _tables(comparison: Comparison) -> str:
    """A sentence and a table for each measure; for transfer scores one table for all."""
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
    """Transfer scores: a row for each layer, the one with the least to adapt first, and a column for each score."""
    order = sites_least_first(comparison)
    titles = [comparison.side_a.name, *comparison.values]
    rows = [
        [comparison.side_a.sites[k], *(f"{values.value[k, 0]:.3g}" for values in comparison.values.values())]
        for k in order[:MOST_SHOWN]
    ]
    text = summarise(comparison, MEAN_EMBEDDING).sentence
    return f"<p>{escape(text)}</p>{html_table(titles, rows, of=len(order), see=REST)}"


def _tables_of_times(dynamics: Dynamics) -> str:
    """A table for each measure: when each site settles, or for two runs how alike their last states are."""
    parts = []
    for measure in dynamics.values:
        titles, columns = dynamics.summary_columns(measure)
        rows = list(zip(dynamics.sites, *columns, strict=True))
        table = html_table([dynamics.name_a, *titles], rows, see=REST)
        parts.append(f"<p>{escape(measure)} to the last state</p>{table}")
    return "".join(parts)
