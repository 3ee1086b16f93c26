"""`sosie extract`: the activations of a model as rows, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def extract(
    model: Annotated[str, typer.Argument(help="A model, as for compare; base=MODEL gives it a name.")],
    data: Annotated[str, typer.Option(help="Data to run it on, as for compare.")],
    out: Annotated[Path, typer.Option(help="The file to write, .safetensors.")],
    sites: opt.Sites = None,
    rows: opt.Rows = "flatten",
    dtype: Annotated[
        str | None, typer.Option(help="float16 or bfloat16 halve the file, float64 doubles it; else as computed.")
    ] = None,
    max_rows: opt.MaxRows = None,
    batch: opt.Batch = 256,
    device: opt.Device = None,
) -> None:
    """Write a model's activations as rows into one file, in one pass, for `sosie compare` and other tools."""
    from ..capture import open_activations
    from ..engine import extract as write
    from ..results import counted

    (spec,), names = opt.split_names([model])
    path = write(
        spec, opt.open_data(data, batch), out=out, sites=opt.split(sites), rows=rows, dtype=dtype, max_rows=max_rows,
        device=device, name=None if names is None else names[0],
    )  # fmt: skip
    saved = open_activations(path)
    typer.echo(f"wrote {path}: {counted(len(saved), 'site')}, {counted(saved.n, 'input')}, rows made by {rows}")
    call = f"sosie compare {path} MODEL --data {data} --rows {rows}"
    typer.echo(f"{path.stat().st_size / 2**20:,.1f} MiB; `{call}` compares it")
