"""`sosie record`: what a model gives, as a file that it is held against later."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def record(
    model: Annotated[str, opt.argument(opt.INPUTS, "MODEL", "A model, as for compare; base=MODEL gives it a name.")],
    data: Annotated[str, opt.option(opt.INPUTS, "DATA", opt.DATA)],
    out: Annotated[Path, opt.file("The file to write, .safetensors.", opt.TENSORS)],
    sites: opt.Sites = None,
    floor: Annotated[
        str, opt.option(opt.SURE, "FLOOR", "What must not matter: batch, bfloat16, float16 or tf32; measured now.")
    ] = "batch",
    no_inputs: Annotated[
        bool, opt.flag(opt.OUTPUT, "--no-inputs", "Leave the inputs out; then diff needs --data.")
    ] = False,
    no_replay: Annotated[
        bool, opt.flag(opt.OUTPUT, "--no-replay", "Leave out what each site is given: a smaller file, no guilty layer.")
    ] = False,
    max_rows: Annotated[int, opt.option(opt.INPUTS, "N", "Inputs to record, the first of the data.", min=1)] = 16,
    batch: opt.Batch = 256,
    device: opt.Device = None,
    memory: opt.Memory = None,
) -> None:
    """What does a model give now, to be held against it later?

    $ sosie record small_cnn@demo-a.safetensors --data demo --out golden.safetensors
    $ sosie record "small_cnn(seed=0)" --data demo --sites leaves --max-rows 4 --out golden.safetensors

    `sosie diff golden.safetensors MODEL` says whether a model still gives the same: on another machine, in another
    framework, next year.
    """
    from ..diffing import Record
    from ..diffing import record as write
    from ..results import counted

    (spec,), names = opt.split_names([model])
    path = write(
        spec, opt.open_data(data, batch), out, sites=opt.split(sites), floor=floor, replay=not no_replay,
        max_rows=max_rows, inputs=False if no_inputs else None, device=device, memory=memory,
        name=None if names is None else names[0],
    )  # fmt: skip
    saved = Record.load(path)
    size = f"{path.stat().st_size / 2**20:,.1f} MiB"
    typer.echo(f"wrote {path}: {counted(len(saved.seen), 'site')}, {counted(saved.inputs, 'input')}, {size}")
    typer.echo(f"`sosie diff {path} MODEL{f' --data {data}' if no_inputs else ''}` holds a model against it")
