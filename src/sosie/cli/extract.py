"""`sosie extract`: the activations of a model as rows, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def extract(
    model: Annotated[str, opt.argument(opt.INPUTS, "MODEL", "A model, as for compare; base=MODEL gives it a name.")],
    data: Annotated[str, opt.option(opt.INPUTS, "DATA", opt.DATA)],
    out: Annotated[Path, opt.file("The file to write, .safetensors.", opt.TENSORS)],
    sites: opt.Sites = None,
    rows: opt.Rows = "flatten",
    dtype: Annotated[
        str | None,
        opt.option(
            opt.OUTPUT, "TYPE", "float16 or bfloat16 halve the file, float64 doubles it.", default="as computed"
        ),
    ] = None,
    max_rows: opt.MaxRows = None,
    batch: opt.Batch = 256,
    device: opt.Device = None,
) -> None:
    """What does a model make of my data, at every site?

    $ sosie extract small_cnn@demo-a.safetensors --data demo --out a.safetensors
    $ sosie extract "small_cnn(seed=0)" --data demo --sites "relu*" --dtype float16 --out a.safetensors

    Writes the activations as rows into one file, in one pass, for `sosie compare` and other tools.
    """
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
