"""`sosie measures`: every measure with its facts."""

from __future__ import annotations

import json

import typer

from . import options as opt


def measures(as_json: opt.AsJson = False) -> None:
    """List the measures with range, direction, invariances, cost and paper."""
    from ..engine import list_measures
    from ..report import print_measures

    result = list_measures()
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print_measures(result)
