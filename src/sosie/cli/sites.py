"""`sosie sites`: what of a model can be compared."""

from __future__ import annotations

from typing import Annotated

import typer

from .lists import split


def sites(
    model: Annotated[str, typer.Argument(help="A model, e.g. tiny10@weights.safetensors or file.py:factory.")],
    select: Annotated[
        str | None, typer.Option("--sites", help="Names, globs, 'leaves' or 'blocks', separated by commas.")
    ] = None,
    shape: Annotated[str, typer.Option(help="Shape of one input, e.g. 3x32x32.")] = "3x32x32",
    data: Annotated[str | None, typer.Option(help="Take the input from this data instead.")] = None,
    rows: Annotated[str, typer.Option(help="How activations become rows; decides the width.")] = "flatten",
) -> None:
    """Show what can be compared in a model: labels in execution order, shapes and widths."""
    from ..engine import look_at
    from ..models import open_model
    from ..report import print_sites

    named = open_model(model)
    found = look_at(named, data if data is not None else _shape(shape), sites=split(select) or "leaves", rows=rows)
    print_sites(named.name, found)


def _shape(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError as error:
        raise ValueError(f"a shape looks like 3x32x32, got {text!r}") from error
    if not found or min(found) < 1:
        raise ValueError(f"a shape looks like 3x32x32, got {text!r}")
    return found
