"""`sosie measures`: every measure with its facts."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from . import options as opt

# What `sosie.list_measures()` returns, written by `make docs`: to ask the measures themselves takes importing torch.
FACTS = Path(__file__).resolve().parents[1] / "measures" / "facts.json"


def measures(as_json: opt.AsJson = False) -> None:
    """Which measures are there, and what does each one mean?

    $ sosie measures
    $ sosie measures --json

    Range, direction, invariances, cost and paper of each.
    """
    from ..report.terminal import print_measures

    result = json.loads(FACTS.read_text("utf-8"))
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print_measures(result)
