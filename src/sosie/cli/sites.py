"""`sosie sites`: the sites of a model that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from . import options as opt

COMMON = ((3, 32, 32), (1, 28, 28), (3, 224, 224))  # input shapes tried by default
TEXTS = (["How alike are these networks?", "How alike are these two?"],)  # for models of texts


def sites(
    model: Annotated[
        str, opt.argument(opt.INPUTS, "MODEL", "A model, e.g. tiny10@weights.safetensors or file.py:factory.")
    ],
    select: Annotated[
        str | None,
        opt.option(
            opt.COMPARED, "NAMES", "Names, globs, leaves or blocks, separated by commas.", "--sites", default="leaves"
        ),
    ] = None,
    shape: Annotated[
        str | None,
        opt.option(opt.INPUTS, "SHAPE", "Shape of one input, e.g. 3x32x32.", default="common image shapes are tried"),
    ] = None,
    data: Annotated[str | None, opt.option(opt.INPUTS, "DATA", "Take the input from these data instead.")] = None,
    rows: opt.Rows = "flatten",
) -> None:
    """Which layers of a model can be compared, and how wide are they?

    $ sosie sites small_cnn
    $ sosie sites resnet20 --sites blocks --shape 3x32x32 --rows mean
    """
    from ..engine import look_at
    from ..models import open_model
    from ..report import print_sites

    named = open_model(model)
    common = TEXTS if getattr(named.prepare, "text_only", False) else COMMON
    inputs: Sequence[Any] = common if data is None and shape is None else [data or opt.parse_shape(shape)]
    failed: list[str] = []
    for used in inputs:
        try:
            result = look_at(named, used, sites=opt.split(select) or "leaves", rows=rows)
            break
        except Exception as error:  # anything that a model raises for a wrong shape
            if len(inputs) == 1:
                raise
            failed.append(f"{used}: {str(error).splitlines()[0]}")
    else:
        tried = "\n  ".join(failed)
        raise ValueError(f"{named.name} accepts none of the common image shapes; give --shape or --data\n  {tried}")
    print_sites(named.name, result)
    described = "x".join(map(str, used)) if isinstance(used, tuple) else used
    typer.echo(f"for {'a short text' if used in TEXTS else f'an input of {described}'}")
    if select is None:
        typer.echo(
            "`sosie compare` takes blocks if there are any: --sites blocks shows them, --sites leaves takes these"
        )
