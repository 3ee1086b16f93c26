"""The page: one HTML file that shows a comparison, loads nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Hashable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import numpy as np
from markupsafe import Markup

from ..files import write_atomically
from ..results import (
    LEVEL,
    TENSORS,
    TRANSFER,
    Answer,
    Comparison,
    Comparisons,
    Dynamics,
    Estimate,
    Leaderboard,
    Side,
    by_chance,
    correction,
    headline,
    in_order,
    indices,
    layers,
    summarise,
)
from .colour import data_scale, full_scale, ramp
from .words import (
    caveat_groups,
    direction,
    extent,
    flat,
    listed,
    note_on_weights,
    sentence,
    sentence_of_all,
    shared_measures,
    size,
    visible,
)

# What the page shows, as plain data: names once, numbers packed, caveats grouped

MOST_NUMBERS = 1_000_000  # about 5 MB; beyond it a page of many models leaves intervals and chance out, and says so
_SPARED = ("low", "high", "null", "null_spread")  # what is then left out; p stays, it decides how a cell looks
_DOUBT = (*_SPARED, "p", "p_search")

# What is shuffled where no rows are paired, by the rule that makes the rows
_SHUFFLED = {
    "entries of the input": "shuffled entries of the input give, or shuffled weights if these were drawn",
    TENSORS: "shuffled weights give",
}

T = TypeVar("T", bound=Hashable)


def contents(result: Comparison | Comparisons) -> dict[str, Any]:
    """Everything the page's script reads."""
    many = isinstance(result, Comparisons)
    pairs = list(result.pairs.items()) if isinstance(result, Comparisons) else [((0, 1), result)]
    brief = many and _numbers(pairs) > MOST_NUMBERS
    sides: dict[Side, int] = {}
    records: dict[tuple[tuple[str, str], ...], int] = {}
    pairs_shown = []
    for (i, j), comparison in pairs:
        sides_of = (comparison.side_a, comparison.side_b)
        pairs_shown.append(
            {
                "i": i,
                "j": j,
                "a": _number_of(comparison.side_a, sides),
                "b": _number_of(comparison.side_b, sides),
                "title": title(comparison),
                "chance": _SHUFFLED.get(comparison.rows_rule, "the measure gives when rows are paired at random"),
                "layers": [len(layers(side.sites, comparison.rows_rule)) for side in sides_of],
                "provenance": _number_of(tuple(flat(comparison.provenance)) if comparison.provenance else (), records),
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
        "ramp": list(ramp()),
        "level": LEVEL,
        "sides": [_side(side) for side in sides],
        "records": [list(map(list, record)) for record in records],
        "names": [visible(name) for name in result.names] if isinstance(result, Comparisons) else [],
        "models": _models(result) if isinstance(result, Comparisons) else [],
        "pairs": pairs_shown,
    }


def title(result: Comparison | Comparisons) -> str:
    every = [result] if isinstance(result, Comparison) else list(result)
    if result.kind == "transfer":
        models, data = (dict.fromkeys(getattr(c, side).name for c in every) for side in ("side_a", "side_b"))
        return f"{listed([*models], 'models')} on {listed([*data], 'sets of data')}"
    names = [result.side_a.name, result.side_b.name] if isinstance(result, Comparison) else result.names
    return listed(names, "models")


def packed(array: np.ndarray) -> str:
    """Row by row, in base64: four bytes a number, as seven digits are more than is shown, so nothing is rounded twice.

    Eight bytes where four cannot hold the size of a number. NaN where undefined.
    """
    finite = np.where(np.isfinite(array), array, np.nan)
    size = np.abs(finite[np.isfinite(finite) & (finite != 0)])
    fits = not size.size or (size.min() > 1e-37 and size.max() < 1e38)
    return base64.b64encode(finite.astype("<f4" if fits else "<f8").tobytes()).decode()


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
        **_reading(values),
    }
    given = {kind: getattr(values, kind) for kind in _DOUBT if getattr(values, kind) is not None}
    shown["dropped"] = [kind for kind in given if brief and kind in _SPARED]
    shown.update({kind: packed(array) for kind, array in given.items() if kind not in shown["dropped"]})
    shown["correction"] = None if by_chance(values) is None else correction(values)
    shown["calibrated"] = None if "null" in shown["dropped"] else _calibrated(values)
    return shown


def _stitched(comparison: Comparison) -> dict[str, Any] | None:
    """The index of the measure that says how the stitched networks do, and of those drawn beside it."""
    does, names = headline(comparison), list(comparison.values)
    if does is None:
        return None
    says = [name for name in indices(comparison) if comparison[name].closer == "up"]
    return {
        "does": names.index(does),
        "says": [names.index(name) for name in says],
    }


def _counted(comparison: Comparison, name: str) -> tuple[str, str]:
    """The term and the number of what the values of a measure rest on."""
    n, rule = comparison[name].n, comparison.rows_rule
    if comparison.kind == "stitching" and name not in indices(comparison):
        return "Inputs", f"{n:,}, each answered once"
    if rule == TENSORS:
        return "Numbers", f"{n:,} in all layers of A"
    return "Rows", f"{n:,}, made by the rule “{visible(rule)}”"


def _calibrated(values: Estimate) -> dict[str, Any] | None:
    """How to read the scores, which the page computes from value and chance."""
    score = values.score
    if score is None or not np.isfinite(score).any():
        return None
    return _reading(replace(values, value=score, closer="up", bounds=(None, 1.0), same=1.0))


def _reading(values: Estimate) -> dict[str, Any]:
    full, data = full_scale(values), data_scale(values)
    return {
        "closer": values.closer,
        "direction": direction(values.closer),
        "full": [full.far, full.alike],
        "clipped": full.clipped,
        "data": [data.far, data.alike],
    }


def _models(result: Comparisons) -> list[dict[str, Any]]:
    """A model by model matrix for each measure that every pair has."""
    models = []
    for name in shared_measures(result):
        values = between_models(result, name)
        models.append({"name": visible(name), "value": packed(values.value), **_reading(values)})
    return models


def between_models(result: Comparisons, measure: str) -> Estimate:
    """The model by model matrix, with the measure's facts; means over layers have no interval and no p."""
    nothing: dict[str, Any] = dict.fromkeys((*_DOUBT, "block_error"))
    return replace(next(iter(result))[measure], value=result.matrix(measure), caveats=(), **nothing)


def _side(side: Side) -> dict[str, Any]:
    return {
        "name": visible(side.name),
        "sites": [visible(site) for site in side.sites],
        "shapes": [size(shape) for shape in side.shapes],
        "widths": list(side.widths),
    }


def _number_of(item: T, seen: dict[T, int]) -> int:
    return seen.setdefault(item, len(seen))


def _numbers(pairs: list[tuple[tuple[int, int], Comparison]]) -> int:
    return sum(
        values.value.size * (1 + sum(getattr(values, kind) is not None for kind in _DOUBT))
        for _, comparison in pairs
        for values in comparison.values.values()
    )


_FOLDER = Path(__file__).with_name("page")
_EVERY_SCRIPT = ("dom", "labels", "tip", "parts", "scroll")  # of every page, before its own
_SCRIPTS = (
    *("scale", "heatmap", "pointing", "chance", "pair", "pinned", "curve", "table"),
    *("stitched", "transfer", "words", "download", "page"),
)
# In a JSON string these are the same character; in HTML they can no longer end the script or start a tag.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


# Which module renders a result: each has a function `render`
_PAGES = {Comparison: "page", Comparisons: "page", Dynamics: "dynamics", Leaderboard: "leaderboard", Answer: "answers"}


def write_report(
    result: Comparison | Comparisons | Dynamics | Leaderboard | Answer, path: str | os.PathLike[str]
) -> Path:
    """Write one self-contained HTML file about a comparison, all pairs of models, dynamics, or an answer of a zoo."""
    module = next((module for kind, module in _PAGES.items() if isinstance(result, kind)), None)
    if module is None:
        known = ", ".join(kind.__name__ for kind in _PAGES)
        raise TypeError(f"write_report shows a result ({known}), not a {type(result).__name__}")
    return write_atomically(path, import_module(f".{module}", __package__).render(result))


def render(result: Comparison | Comparisons) -> str:
    """The page of a comparison, or of all pairs of models."""
    if isinstance(result, Comparison):
        every, lines = [result], [sentence(result, name) for name in result.values]
    else:
        every, lines = list(result), [sentence_of_all(result, name) for name in shared_measures(result)]
    return render_page(
        title=title(result),
        question="How much is there to adapt?" if result.kind == "transfer" else "How alike are they?",
        lead=lines[0] if lines else "Nothing was measured.",
        others=lines[1:],
        kind="measure",
        data=contents(result),
        scripts=_SCRIPTS,
        styles=("figures", "page"),  # the page's print rules come last
        note=note_on_weights(*(each.provenance for each in every)),
    )


def render_page(
    *,
    title: str,
    question: str,
    lead: str,
    others: Sequence[str],
    kind: str,
    data: dict[str, Any],
    scripts: Sequence[str],
    styles: Sequence[str],
    note: str = "",
) -> str:
    """One self-contained file: words, data and scripts. `kind`: what each of the others is about (singular)."""
    script = "\n".join(_read(f"{name}.js") for name in (*_EVERY_SCRIPT, *scripts))
    script = f"(() => {{\n'use strict';\n{script}}})();"
    style = "".join(style_file(name).read_text(encoding="utf-8") for name in ("colours", *styles))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_read("template.html.jinja")).render(
        title=title,
        question=question,
        lead=lead,
        others=list(others),
        kind=kind,
        note=note,
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'",
        data=as_script_data(data),
        script=Markup(script),
        style=Markup(style),
    )


def as_script_data(data: dict[str, Any]) -> Markup:
    """JSON that may stand inside a script element, whatever its strings contain."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_ESCAPES))


def _digest(text: str) -> str:
    """The hash by which the page's policy recognises its own script and style, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def style_file(name: str) -> Path:
    """A stylesheet of the page; "colours" is the explorer's, too."""
    return _FOLDER / f"{name}.css"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
