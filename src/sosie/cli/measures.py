"""`sosie measures`: every measure with its facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt

# What `sosie.list_measures()` returns, written by `make docs`: to ask the measures themselves takes importing torch.
FACTS = Path(__file__).resolve().parents[1] / "measures" / "facts.json"


def measures(
    names: Annotated[
        list[str] | None, opt.argument(opt.INPUTS, "MEASURE", "Only those with this in their name.", default="all")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Which measures are there, and what does each one mean?

    $ sosie measures
    $ sosie measures cka

    Range, direction, invariances, cost and paper of each. Measures of other installed packages come last.
    """
    from .. import plugins
    from ..checks import nearest
    from ..report.terminal import print_measures

    facts = json.loads(FACTS.read_text("utf-8"))
    if plugins.names("measures"):
        from ..engine import list_measures

        facts = list_measures()
    for text in names or []:
        if not any(text.lower() in fact["name"] for fact in facts):
            raise ValueError(f"no measure is called {text!r}{nearest(text, [fact['name'] for fact in facts])}")
    result = [fact for fact in facts if any(text.lower() in fact["name"] for text in names or [""])]
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print_measures(result)
