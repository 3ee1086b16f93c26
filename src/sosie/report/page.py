"""A page: one HTML file that shows a result, loads nothing, and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..papers import cited
from ..results import Estimate
from .colour import data_scale, full_scale
from .words import direction, visible

_FOLDER = Path(__file__).with_name("page")
SHARED = _FOLDER / "shared.js", _FOLDER / "download.js"  # modules that the explorer loads, too
_EVERY_SCRIPT = ("shared", "dom", "labels", "tip", "download", "parts", "scroll")  # of every page, before its own
# Equal in a JSON string, but in HTML they cannot end the script or start a tag.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


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
    """One self-contained file: text, data and scripts. `kind`: the subject of each of `others`, in the singular."""
    import jinja2
    from markupsafe import Markup

    script = "\n".join(_read(f"{name}.js") for name in (*_EVERY_SCRIPT, *scripts))
    script = re.sub(r"^export |^import .*\n", "", script, flags=re.M)  # here modules are one script
    script = f"(() => {{\n'use strict';\n{script}}})();"
    style = "".join(style_file(name).read_text(encoding="utf-8") for name in ("colours", "base", *styles))
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
        data=Markup(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)),
        script=Markup(script),
        style=Markup(style),
    )


def _digest(text: str) -> str:
    """The hash by which the page's policy recognises its own script and style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def style_file(name: str) -> Path:
    """A stylesheet of the page; the explorer uses "colours" and "base" too."""
    return _FOLDER / f"{name}.css"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def packed(array: np.ndarray) -> str:
    """Numbers in base64, row by row: four bytes each (seven digits, more than are shown), NaN where undefined.

    Eight bytes each if a number is too large or too small for four.
    """
    finite = np.where(np.isfinite(array), array, np.nan)
    size = np.abs(finite[np.isfinite(finite) & (finite != 0)])
    fits = not size.size or (size.min() > 1e-37 and size.max() < 1e38)
    return base64.b64encode(finite.astype("<f4" if fits else "<f8").tobytes()).decode()


def reading(values: Estimate) -> dict[str, Any]:
    """How to read the values of a measure: what they are, the direction, and the ends of both colour scales."""
    full, data = full_scale(values), data_scale(values)
    return {
        "meaning": visible(values.meaning) if values.meaning else "",
        "papers": [[paper.short, paper.link] for paper in cited(values.paper) if paper.link],
        "closer": values.closer,
        "direction": direction(values.closer),
        "full": [full.far, full.alike],
        "clipped": full.clipped,
        "data": [data.far, data.alike],
    }
