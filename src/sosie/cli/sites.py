"""`sosie sites`: what of a model can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .options import split

COMMON = ((3, 32, 32), (1, 28, 28), (3, 224, 224))  # input shapes tried where none is given


def sites(
    model: Annotated[str, typer.Argument(help="A model, e.g. tiny10@weights.safetensors or file.py:factory.")],
    select: Annotated[
        str | None, typer.Option("--sites", help="Names, globs, 'leaves' or 'blocks', separated by commas.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of one input, e.g. 3x32x32; else common image shapes are tried.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Take the input from this data instead.")] = None,
    rows: Annotated[str, typer.Option(help="How activations become rows; decides the width.")] = "flatten",
) -> None:
    """Show what can be compared in a model: labels in execution order, shapes and widths."""
    from ..models import open_model
    from ..report import print_sites

    named = open_model(model)
    inputs = [data] if data is not None else [parse_shape(shape)] if shape is not None else COMMON
    found, used = _first_that_fits(named, inputs, split(select) or "leaves", rows)
    print_sites(named.name, found)
    typer.echo(f"for an input of {'x'.join(map(str, used)) if isinstance(used, tuple) else used}")
    if select is None:
        typer.echo(
            "`sosie compare` takes blocks where there are any: --sites blocks shows them, --sites leaves takes these"
        )


def _first_that_fits(named: Any, inputs: Sequence[Any], select: Any, rows: str) -> tuple[Any, Any]:
    from ..engine import look_at

    failed: list[str] = []
    for each in inputs:
        try:
            return look_at(named, each, sites=select, rows=rows), each
        except Exception as error:  # whatever the model raises when the shape does not suit it
            if len(inputs) == 1:
                raise
            failed.append(f"{each}: {str(error).splitlines()[0]}")
    raise ValueError(
        f"{named.name} takes none of the common image shapes; give --shape or --data\n  " + "\n  ".join(failed)
    )


def parse_shape(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError as error:
        raise ValueError(f"a shape looks like 3x32x32, got {text!r}") from error
    if min(found) < 1:
        raise ValueError(f"a shape looks like 3x32x32, got {text!r}")
    return found
