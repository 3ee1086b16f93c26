"""The page: one HTML file that shows a comparison, loads nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..results import Answer, Comparison, Comparisons, Dynamics, Leaderboard, write_atomically
from .contents import contents, question, sentences, title
from .words import note_on_weights

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = (
    "dom",
    "labels",
    "scale",
    "tip",
    "heatmap",
    "pointing",
    "chance",
    "pair",
    "pinned",
    "curve",
    "scroll",
    "table",
    "stitched",
    "transfer",
    "words",
    "download",
    "page",
)
# In a JSON string these are the same character; in HTML they can no longer end the script or start a tag.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def write_report(
    result: Comparison | Comparisons | Dynamics | Leaderboard | Answer, path: str | os.PathLike[str]
) -> Path:
    """Write one self-contained HTML file about a comparison, all pairs of models, dynamics, or what a zoo answers."""
    if isinstance(result, Answer):
        from .answers import render_answer

        return write_atomically(path, render_answer(result))
    if isinstance(result, Leaderboard):
        from .leaderboard import render_leaderboard

        return write_atomically(path, render_leaderboard(result))
    if isinstance(result, Dynamics):
        from .dynamics import render_dynamics

        return write_atomically(path, render_dynamics(result))
    if not isinstance(result, (Comparison, Comparisons)):
        raise TypeError(
            "write_report shows a Comparison, Comparisons, Dynamics, Leaderboard, or what a zoo answers, not a "
            f"{type(result).__name__}"
        )
    return write_atomically(path, render(result))


def render(result: Comparison | Comparisons) -> str:
    found = sentences(result)
    return render_page(
        title=title(result),
        question=question(result),
        lead=found[0] if found else "Nothing was measured.",
        others=found[1:],
        kind="measures",
        data=contents(result),
        scripts=_SCRIPTS,
        styles=("figures", "page"),  # the page's print rules come last
        note=note_on_weights(*(each.provenance for each in ([result] if isinstance(result, Comparison) else result))),
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
    """One self-contained file: the words (a `kind` of thing is what each of the others is about), data and scripts."""
    script = "\n".join(_read(f"{name}.js") for name in scripts)
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


def as_script_data(found: dict[str, Any]) -> Markup:
    """JSON that may stand inside a script element, whatever its strings contain."""
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_ESCAPES))


def _digest(text: str) -> str:
    """The hash by which the page's policy recognises its own script and style, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def style_file(name: str) -> Path:
    """A stylesheet of the page; "colours" is the explorer's, too."""
    return _FOLDER / f"{name}.css"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
