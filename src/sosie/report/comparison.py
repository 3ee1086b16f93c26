"""Comparisons on the terminal and as a page: sentences, tables of best matches, maps, and caveats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from ..results import (
    LEVEL,
    MEAN_EMBEDDING,
    TENSORS,
    TRANSFER,
    Comparison,
    Comparisons,
    Estimate,
    Side,
    by_chance,
    correction,
    counted,
    doubts,
    headline,
    in_order,
    indices,
    layers,
    least_first,
    number,
    over_sites,
    rules_of,
    sites_least_first,
    summarise,
    transfer_sentence_of_all,
    two_decimals,
)
from .colour import RAMP
from .page import packed, reading, render_page
from .terminal import MOST_ROWS, NARROWEST, print_bullets, print_columns, print_text, shown_rows, table_width, with_gaps
from .words import extent, flat, in_a_sentence, listed, note_on_weights, shorten, size, visible

MOST_CAVEATS = 12
_UNCLEAR = "?"  # after a value that is not distinguishable from chance; visible without colour, in any encoding


def print_comparison(result: Comparison | Comparisons, console: Console | None = None, *, full: bool = False) -> None:
    """Print a sentence, a table of best matches and the caveats for each measure.

    Long tables are cut in the middle unless `full`; for several models, `full` also prints the tables of each pair.
    """
    console = console or Console()
    if isinstance(result, Comparison):
        _print_pair(result, console, full)
        print_text(console, note_on_weights(result.provenance), "yellow")
    else:
        _print_models(result, console, full)
        print_text(console, note_on_weights(*(each.provenance for each in result)), "yellow")


def _print_pair(result: Comparison, console: Console, full: bool) -> None:
    if not result.values:
        console.print("Nothing was measured.")
    elif result.kind == "transfer":
        _print_scores(result, console, full)
    elif len(result.side_a.sites) == len(result.side_b.sites) == 1:
        text, rows = one_pair(result)
        print_text(console, text, "bold")
        print_columns(console, list(ONE_PAIR), rows, gap=3)
        _print_caveats([result], console)
    elif result.kind == "shifts" or in_order(result):
        _print_in_order(result, console)
    else:
        _print_best_matches(result, console, full)


def _print_best_matches(result: Comparison, console: Console, full: bool) -> None:
    for k, (measure, values) in enumerate(result.values.items()):
        if k:
            console.print()
        print_text(console, sentence(result, measure), "bold")
        titles = list(doubts(values, 0, None))
        last = "same\ndepth" if {"chance", "p"} & set(titles) else "same depth"
        heads = [result.side_a.name, f"best in {result.side_b.name}", "value", *titles, last]
        gap = 2 if len(heads) > 4 else 3
        rows = _matches(result, measure, full, 3)
        # Beside chance and intervals, one digit fewer if names would have to be cut otherwise.
        plain = ["", "", *heads[2:]]
        best = np.abs(summarise(result, measure).best)
        alike = np.nanmax(best, initial=0) < 0.1 or np.nanmin(best, initial=1) > 0.99  # all 0.0… or 1.00 in two digits
        if gap == 2 and not alike and table_width(plain, rows.values()) > console.width:
            rows = _matches(result, measure, full, 2)
        print_columns(console, heads, with_gaps(console, rows, len(result.side_a.sites)), left=(0, 1), gap=gap)
        if "p" in titles:
            levels = f"* p ≤ {LEVEL:g}, ** p ≤ 0.01, *** p ≤ 0.001"
            meaning = f"{_UNCLEAR} and n.s.: not distinguishable from chance (p {correction(values)})."
            print_text(console, f"{levels}; {meaning}", "dim")
        lines = [f"{group.text} ({group.reach})" for group in caveat_groups(result, measure)]
        hidden = 0 if full else max(len(lines) - MOST_CAVEATS, 0)
        print_bullets(console, lines[: len(lines) - hidden] + [f"… {hidden} more"] * bool(hidden), "yellow")


def _matches(result: Comparison, measure: str, full: bool, digits: int) -> dict[int, list[str | Text]]:
    """A row for each layer of A: its best match, the numbers beside it, and the value at the same depth."""
    values, summary = result[measure], summarise(result, measure)
    rows: dict[int, list[str | Text]] = {}
    for i in shown_rows(len(result.side_a.sites), full):
        j = summary.best_partner[i]
        names = [visible(result.side_a.sites[i]), "none" if j is None else visible(result.side_b.sites[j])]
        value, at_depth = (_value(values, i, k, digits) for k in (j, summary.depth_partner[i]))
        rows[i] = [*names, value, *doubts(values, i, j, digits).values(), at_depth]
    return rows


def _value(values: Estimate, i: int, j: int | None, digits: int) -> Text:
    """A value, dimmed and marked if it is not distinguishable from chance; the mark has a column of its own."""
    chance = by_chance(values)
    text = number(float("nan") if j is None else values.value[i, j], digits)
    if chance is None:
        return Text(text)
    unclear = j is not None and chance[i, j]
    return Text(text + (_UNCLEAR if unclear else " "), "dim" if unclear else "")


ONE_PAIR = ("measure", "value", "interval", "chance")


def one_pair(result: Comparison) -> tuple[str, list[list[str]]]:
    """A sentence, and a row of `ONE_PAIR` for each measure, for one site on each side, as for outputs."""
    if "agreement" in result.values:
        text = sentence(result, "agreement")
    else:
        names = " and ".join(shorten(visible(side.name), 60) for side in (result.side_a, result.side_b))
        text = f"{names}, {next(iter(result.values.values())).n:,} inputs"
    rows = []
    for name, values in result.values.items():
        beside = doubts(values, 0, 0)
        rows.append([visible(name), number(values.value.item()), *(beside.get(k, "") for k in ONE_PAIR[2:])])
    return text, rows


def _print_models(result: Comparisons, console: Console, full: bool) -> None:
    if result.kind == "transfer":
        _print_mean_scores(result, console)
    else:
        for measure in shared_measures(result):
            print_text(console, sentence_of_all(result, measure), "bold")
            _print_matrix(result, measure, console)
    every = least_first(result) if result.kind == "transfer" else list(result)
    if not full:
        print_bullets(console, [sentence(pair, next(iter(pair.values))) for pair in every if pair.values])
        if result.kind == "transfer":
            _print_caveats(every, console)
        return
    for comparison in every:
        console.print()
        _print_pair(comparison, console, full)


def _print_matrix(result: Comparisons, measure: str, console: Console) -> None:
    """The model by model matrix, with as many columns as fit; the page has all of them."""
    fitting = max((console.width - 24) // 12, 1)
    heads = [shorten(visible(name), 9) for name in result.names[:fitting]]
    more = [f"… {len(result.names) - fitting} more"] if len(result.names) > fitting else []
    rows = (
        [shorten(visible(name), 20), *map(number, row[:fitting]), *[""] * len(more)]
        for name, row in zip(result.names, result.matrix(measure), strict=True)
    )
    print_columns(console, ["", *heads, *more], rows, left=(0, fitting + 1), names=(0,), gap=3)


# Layers paired one to one, or shifts: a line for each, a column for each measure

Column = tuple[str, list[str]]  # the title and the cells


def _print_in_order(result: Comparison, console: Console) -> None:
    """The values of each pair, intervals if they fit, and every caveat once."""
    print_text(console, sentence(result, next(iter(result.values))), "bold")
    pairs = zip(map(visible, result.sites_a), map(visible, result.sites_b), strict=True)
    sites = [a if a == b else f"{a} → {b}" for a, b in pairs]
    longest = max(map(len, sites))
    for intervals in (True, False):
        columns = [
            column for k, name in enumerate(result.values) for column in _columns(result, name, intervals and not k)
        ]
        width = console.width - min(longest, NARROWEST) - 3
        if sum(map(_width, columns)) <= width:
            break
    else:
        width = console.width - min(longest, max(NARROWEST, console.width // 3)) - 2
    for some in _fitting(columns, width):
        rows = ([site, *(cells[k] for _, cells in some)] for k, site in enumerate(sites))
        print_columns(console, ["shift" if result.kind == "shifts" else "layer", *(title for title, _ in some)], rows)
    _print_caveats([result], console)


def _columns(result: Comparison, name: str, intervals: bool) -> list[Column]:
    """The values of a measure, and chance if it was measured, without which some values mean nothing."""
    texts = [doubts(result[name], k, k) for k in range(len(result.sites_a))]
    cells = [number(value) for value in np.diag(result[name].value)]
    if intervals and "interval" in texts[0]:
        cells = [f"{cell} {text['interval']}" for cell, text in zip(cells, texts, strict=True)]
    columns = [(visible(name).replace("_", "\n"), cells)]
    if result.kind != "shifts" and result[name].null_spread is not None and "chance" in texts[0]:
        columns.append(("by\nchance", [text["chance"] for text in texts]))
    return columns


def _width(column: Column) -> int:
    title, cells = column
    return table_width([title], [[cell] for cell in cells])


def _fitting(columns: list[Column], width: int) -> Iterator[list[Column]]:
    """Groups of as many columns as fit into a table, since a cut number would look whole."""
    some: list[Column] = []
    for column in columns:
        if some and sum(map(_width, (*some, column))) > width:
            yield some
            some = []
        some.append(column)
    yield some


# Transfer scores: layers and models, those with the least to adapt first

_LEAST = "smallest mean_embedding first: least to adapt"
_SCORES = [name.replace("_", "\n") for name in TRANSFER]


def _print_mean_scores(result: Comparisons, console: Console) -> None:
    """A line for each model: means over layers."""
    ranked = least_first(result)
    print_text(console, sentence_of_all(result, MEAN_EMBEDDING), "bold")
    several = len({c.side_b.name for c in ranked}) > 1
    rows = []
    for c in ranked:
        name = visible(c.side_a.name) + (f" on {visible(c.side_b.name)}" if several else "")
        rows.append([name, *(_digits(over_sites(c, score)) for score in TRANSFER)])
    print_columns(console, ["model", *_SCORES], rows)
    print_text(console, f"Means over layers, {_LEAST}.", "dim")


def _print_scores(result: Comparison, console: Console, full: bool) -> None:
    """A line for each layer of a model."""
    print_text(console, sentence(result, MEAN_EMBEDDING), "bold")
    order = sites_least_first(result)
    shown = order if full or len(order) <= MOST_ROWS + 1 else order[:MOST_ROWS]
    rows = [
        [f"{k + 1} {visible(result.side_a.sites[k])}", *(_digits(v.value[k, 0]) for v in result.values.values())]
        for k in shown
    ]
    print_columns(console, ["layer", *_SCORES], rows)
    hidden = f"; {len(order) - len(shown)} more: --full" if len(shown) < len(order) else ""
    print_text(console, f"Numbered from the input on, {_LEAST}{hidden}.", "dim")
    wide = []
    for name, values in result.values.items():
        if values.low is not None and values.high is not None:
            reach = (values.high - values.low) / 2
            relative = f"{float((reach / values.value).max()):.0%}"
            wide.append(f"{name} ± {f'{float(reach.max()):.2g}' if name.startswith('log') else relative}")
    if wide:
        print_text(console, f"Sampled or sketched, the 95 % intervals at their widest: {', '.join(wide)}.", "dim")
    _print_caveats([result], console)


def _digits(value: float) -> str:
    """Three significant digits: scores lie orders of magnitude apart."""
    return f"{value:.3g}" if math.isfinite(value) else "undefined"


def _print_caveats(results: Iterable[Comparison], console: Console) -> None:
    """Every caveat once, with its measures; for transfer scores also the layers."""
    abouts: dict[str, dict[str, None]] = {}
    for result in results:
        for name in result.values:
            for group in caveat_groups(result, name):
                named = result.kind == "transfer" and not group.everywhere
                sites = [visible(result.side_a.sites[i]) for i, _ in group.where if named and i is not None]
                abouts.setdefault(group.text, {})[f"{name} of {', '.join(sites)}" if sites else name] = None
    print_bullets(console, [f"{text} ({', '.join(about)})" for text, about in abouts.items()], "yellow")


# Sentences and caveats, with names made safe to show


def sentence(comparison: Comparison, measure: str) -> str:
    """A sentence that sums up a measure."""
    return visible(summarise(_speakable(comparison), measure).sentence)


def _speakable(comparison: Comparison) -> Comparison:
    """The comparison with names that can stand in a sentence."""
    sides = []
    for side in (comparison.side_a, comparison.side_b):
        sites = tuple(map(in_a_sentence, side.sites))
        if len(set(sites)) < len(set(side.sites)):  # names must stay distinct
            sites = tuple(map(visible, side.sites))
        sides.append(replace(side, name=in_a_sentence(side.name), sites=sites))
    return replace(comparison, side_a=sides[0], side_b=sides[1])


def sentence_of_all(comparisons: Comparisons, measure: str) -> str:
    """A sentence on which two of several models are the most alike, and which the least."""
    if comparisons.kind == "transfer":
        return visible(transfer_sentence_of_all([_speakable(comparison) for comparison in comparisons], measure))
    matrix = comparisons.matrix(measure)
    pairs = [pair for pair in comparisons.pairs if np.isfinite(matrix[pair])]
    if not pairs:
        return f"{visible(measure)} is undefined for every pair of models."
    up = comparisons.pairs[pairs[0]][measure].closer == "up"
    ordered = sorted(pairs, key=lambda pair: matrix[pair], reverse=up)
    first, last = (listed([comparisons.names[k] for k in pair]) for pair in (ordered[0], ordered[-1]))
    best, worst = (two_decimals(matrix[pair]) for pair in (ordered[0], ordered[-1]))
    mean = "shifts" if comparisons.kind == "shifts" else "layers at the same depth"
    single = all(pair[measure].value.size == 1 for pair in comparisons)
    over = "" if single else f", mean over {mean}"
    if len(pairs) > 1 and math.isclose(matrix[ordered[0]], matrix[ordered[-1]], rel_tol=1e-6):
        return f"By {visible(measure)}, all pairs are equally alike ({best}{over})."
    text = f"By {visible(measure)}, {first} are the most alike ({best}{over})"
    return f"{text}." if len(pairs) == 1 else f"{text}, {last} the least ({worst})."


def shared_measures(comparisons: Comparisons) -> list[str]:
    """The measures that every pair has."""
    every = [comparison.values for comparison in comparisons]
    return [name for name in (every[0] if every else ()) if all(name in values for values in every)]


@dataclass(frozen=True)
class CaveatGroup:
    """Caveats with the same text; `where` holds (row, column), with None for all."""

    text: str
    where: tuple[tuple[int | None, int | None], ...]
    reach: str  # the number of pairs of layers it concerns, in words
    everywhere: bool


def caveat_groups(comparison: Comparison, measure: str) -> list[CaveatGroup]:
    """The caveats of a measure, each text once, in their order."""
    rows, columns = _places(comparison.side_a), _places(comparison.side_b)
    grouped: dict[str, list[tuple[int | None, int | None]]] = {}
    for caveat in comparison[measure].caveats:
        places = grouped.setdefault(caveat.text, [])
        for i in [None] if caveat.site_a is None else rows.get(caveat.site_a, []):
            for j in [None] if caveat.site_b is None else columns.get(caveat.site_b, []):
                places.append((i, j))
    groups = []
    for text, where in grouped.items():
        mask = np.zeros(comparison[measure].value.shape, dtype=bool)
        for i, j in where:
            mask[slice(None) if i is None else i, slice(None) if j is None else j] = True
        of = "layer" if comparison.kind == "transfer" else "pair"
        reach = f"concerns all {of}s" if mask.all() else f"concerns {counted(int(mask.sum()), of)}"
        groups.append(CaveatGroup(visible(text), tuple(dict.fromkeys(where)), reach, bool(mask.all())))
    return groups


def _places(side: Side) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for k, site in enumerate(side.sites):
        places.setdefault(site, []).append(k)
    return places


# The data of the page: names once, numbers packed, caveats grouped

MOST_NUMBERS = 1_000_000  # about 5 MB; beyond it a page of many models leaves out intervals and chance, and says so
_SPARED = ("low", "high", "null", "null_spread")  # these are then left out; p stays, since it decides how a cell looks
_DOUBT = (*_SPARED, "p", "p_search")

# What is shuffled for chance if no rows are paired, by the row rule
_SHUFFLED = {
    "entries of the input": "shuffled entries of the input give, or shuffled weights if these were drawn",
    TENSORS: "shuffled weights give",
}


def contents(result: Comparison | Comparisons) -> dict[str, Any]:
    """The data that the page's script reads."""
    names, models, brief = list[str](), list[dict[str, Any]](), False
    if isinstance(result, Comparison):
        pairs = [((0, 1), result)]
    else:
        names, models, pairs = list(map(visible, result.names)), _models(result), list(result.pairs.items())
        every = (values for comparison in result for values in comparison.values.values())
        arrays = (getattr(values, kind) for values in every for kind in ("value", *_DOUBT))
        brief = sum(array.size for array in arrays if array is not None) > MOST_NUMBERS
    sides: dict[Side, int] = {}
    records: dict[tuple[tuple[str, str], ...], int] = {}
    pairs_shown = []
    for (i, j), comparison in pairs:
        record = tuple(flat(comparison.provenance)) if comparison.provenance else ()
        pairs_shown.append(
            {
                "i": i,
                "j": j,
                "a": sides.setdefault(comparison.side_a, len(sides)),
                "b": sides.setdefault(comparison.side_b, len(sides)),
                "title": title(comparison),
                "chance": _SHUFFLED.get(comparison.rows_rule, "the measure gives when rows are paired at random"),
                "layers": [
                    len(layers(side.sites, comparison.rows_rule)) for side in (comparison.side_a, comparison.side_b)
                ],
                "provenance": records.setdefault(record, len(records)),
                "measures": [_measure(comparison, name, brief) for name in comparison.values],
                "inOrder": in_order(comparison),
                "shifted": comparison.kind == "shifts",
                "stitched": _stitched(comparison),
                "transfer": [TRANSFER.get(name, "") for name in comparison.values]
                if comparison.kind == "transfer"
                else None,
            }
        )
    return {
        "ramp": RAMP,
        "level": LEVEL,
        "sides": [_side(side) for side in sides],
        "records": [list(map(list, record)) for record in records],
        "names": names,
        "models": models,
        "pairs": pairs_shown,
    }


def title(result: Comparison | Comparisons) -> str:
    every = [result] if isinstance(result, Comparison) else list(result)
    if result.kind == "transfer":
        models, data = (dict.fromkeys(getattr(c, side).name for c in every) for side in ("side_a", "side_b"))
        return f"{listed([*models], 'models')} on {listed([*data], 'sets of data')}"
    names = [result.side_a.name, result.side_b.name] if isinstance(result, Comparison) else result.names
    return listed(names, "models")


_HEADINGS = {
    "representations": ("{}", "How alike are they?"),
    "outputs": ("Outputs of {}", "Do they give the same answers?"),
    "shifts": ("Outputs of {} under shift", "Do they give the same answers?"),
    "weights": ("Weights of {}", "How alike are they, without data?"),
    "sketches": ("Features and gradients of {}", "Do they use their features alike?"),
    "stitching": ("{}, stitched", "Can one do its job with what the other represents?"),
    "transfer": ("{}", "How much is there to adapt?"),
}


def _measure(comparison: Comparison, name: str, brief: bool) -> dict[str, Any]:
    values, summary = comparison[name], summarise(comparison, name)
    shown: dict[str, Any] = {
        "name": visible(name),
        "sentence": sentence(comparison, name),
        "partner": list(summary.depth_partner),
        "best": list(summary.best_partner),
        "value": packed(values.value),
        "counted": _counted(comparison, name),
        "statistic": visible(values.statistic),
        "same": values.same,
        "extent": extent(values.bounds),
        "caveats": [
            {"text": d.text, "reach": d.reach, "all": d.everywhere, "where": [] if d.everywhere else d.where}
            for d in caveat_groups(comparison, name)
        ],
        **reading(values),
    }
    arrays = {kind: getattr(values, kind) for kind in _DOUBT if getattr(values, kind) is not None}
    shown["dropped"] = [kind for kind in arrays if brief and kind in _SPARED]
    shown.update({kind: packed(array) for kind, array in arrays.items() if kind not in shown["dropped"]})
    shown["pFloor"] = values.p_floor
    shown["correction"] = None if by_chance(values) is None else correction(values)
    shown["calibrated"] = None if "null" in shown["dropped"] else _calibrated(values)
    return shown


def _stitched(comparison: Comparison) -> dict[str, Any] | None:
    """The index of the main measure of stitched networks, and of the measures drawn beside it; and the accuracy of A
    and of B themselves, by the measure that it stands beside.
    """
    if (main := headline(comparison)) is None:
        return None
    names = list(comparison.values)
    beside = [names.index(name) for name in indices(comparison) if comparison[name].closer == "up"]
    own: dict[str, list[float]] = {}
    known = comparison.provenance.get("accuracy")
    if isinstance(known, (list, tuple)) and len(known) == 2 and all(isinstance(x, float) for x in known):
        a, b = known
        own = {"accuracy": [a, b]} | ({"relative_accuracy": [a / b, 1.0]} if b > 0 else {})
    return {"does": names.index(main), "says": beside, "own": own}


def _counted(comparison: Comparison, name: str) -> tuple[str, str]:
    """The name and the number of the inputs, numbers or rows that the values of a measure rest on."""
    n, rule = comparison[name].n, comparison.rows_rule
    if comparison.kind == "stitching" and name not in indices(comparison):
        return "Inputs", f"{n:,}, each answered once"
    if rule == TENSORS:
        return "Numbers", f"{n:,} in all layers of A"
    rules = dict.fromkeys(map(visible, rules_of(rule)))
    words = " for A and ".join(f"“{rule}”" for rule in rules) + (" for B" if len(rules) == 2 else "")
    return "Rows", f"{n:,}, made by the rule{'s' * (len(rules) == 2)} {words}"


def _calibrated(values: Estimate) -> dict[str, Any] | None:
    """How to read the calibrated scores, which the page computes from value and chance."""
    score = values.score
    if score is None or not np.isfinite(score).any():
        return None
    return reading(replace(values, value=score, closer="up", bounds=(None, 1.0), same=1.0))


def _models(result: Comparisons) -> list[dict[str, Any]]:
    """A model by model matrix for each measure that every pair has."""
    models = []
    for name in shared_measures(result):
        values = between_models(result, name)
        models.append({"name": visible(name), "value": packed(values.value), **reading(values)})
    return models


def between_models(result: Comparisons, measure: str) -> Estimate:
    """The model by model matrix with the facts of the measure; means over layers have no interval and no p."""
    nothing: dict[str, Any] = dict.fromkeys((*_DOUBT, "block_error"))
    return replace(next(iter(result))[measure], value=result.matrix(measure), caveats=(), **nothing)


def _side(side: Side) -> dict[str, Any]:
    return {
        "name": visible(side.name),
        "sites": [visible(site) for site in side.sites],
        "shapes": [size(shape) for shape in side.shapes],
        "widths": list(side.widths),
    }


_SCRIPTS = (
    *("scale", "heatmap", "pointing", "chance", "pair", "pinned", "curve", "table"),
    *("stitched", "single", "transfer", "words", "page"),
)


def render(result: Comparison | Comparisons) -> str:
    """The page of a comparison, or of all pairs of models."""
    if isinstance(result, Comparison):
        every, lines = [result], [sentence(result, name) for name in result.values]
    else:
        every, lines = list(result), [sentence_of_all(result, name) for name in shared_measures(result)]
    heading, question = _HEADINGS[result.kind]
    single = isinstance(result, Comparison) and all(values.value.size == 1 for values in result.values.values())
    return render_page(
        title=heading.format(title(result)),
        question=question,
        lead=lines[0] if lines else "Nothing was measured.",
        others=[] if single else lines[1:],  # the one table of the page says the rest
        kind="measure",
        data=contents(result),
        scripts=_SCRIPTS,
        styles=("figures", "page"),  # the page's print rules come last
        note=note_on_weights(*(each.provenance for each in every)),
    )
