"""`sosie sketch`: features and gradients of a model in little space."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def sketch(
    things: Annotated[list[str], opt.argument(opt.INPUTS, "MODEL", "A model; with --merge, sketches.")],
    out: Annotated[Path, opt.file("The file to write, .safetensors.", opt.TENSORS)],
    data: opt.Data = None,
    merge: Annotated[
        bool, opt.flag(opt.INPUTS, "--merge", "Merge sketches of parts of the data instead of making one.")
    ] = False,
    sites: opt.Sites = None,
    size: opt.Size = None,
    stack: Annotated[int | None, opt.option(opt.SURE, "N", "Number of stacked sketches.", default="1", min=1)] = None,
    seed: Annotated[int | None, opt.seed("buckets and signs; one for all sketches", "0")] = None,
    kernels: Annotated[
        str | None,
        opt.option(opt.COMPARED, "NAMES", "Kernels to supply; also maps.", default="features,gradients,hadamard"),
    ] = None,
    rows: opt.SketchRows = None,
    output: opt.Output = None,
    beta: opt.Beta = None,
    memory: opt.Memory = None,
    first_row: Annotated[
        int | None,
        opt.option(opt.INPUTS, "N", "Index of the first input, if the data are a part of more.", default="0", min=0),
    ] = None,
    max_rows: opt.MaxRows = None,
    batch: Annotated[
        int | None, opt.option(opt.RUN, "N", "Inputs per forward pass; does not change values.", default="256", min=1)
    ] = None,
    device: opt.Device = None,
) -> None:
    """Keep features and gradients of a model in a small file to compare.

    $ sosie sketch small_cnn@demo-a.safetensors --data demo --out a.safetensors
    $ sosie sketch "small_cnn(seed=1)" --data demo --sites "relu*" --out b.safetensors

    `sosie compare` and `sosie transfer` read sketches.
    """
    from ..data import DataPart, open_data
    from ..sketching import Sketch, is_sketch
    from ..sketching import sketch as make

    opt.check_outputs(out)
    options = opt.given(
        sites=opt.split(sites), size=size, stack=stack, seed=seed, kernels=opt.split(kernels), rows=rows, output=output,
        beta=beta, memory=memory, max_rows=max_rows, device=device,
    )  # fmt: skip
    if merge:
        others = opt.given(**options, first_row=first_row, data=data, batch=batch)
        if wrong := [f"--{name.replace('_', '-')}" for name in others]:
            raise ValueError(f"{', '.join(wrong)}: not with --merge, which takes sketches as they are")
        if len(things) < 2:
            raise ValueError(f"--merge takes two sketches or more, got {len(things)}")
        result = Sketch.load(things[0])
        for path in things[1:]:
            try:
                result = result.merge(Sketch.load(path))
            except ValueError as error:
                error.add_note(f"while merging {path}")
                raise
    else:
        if len(things) > 1:
            raise ValueError(f"one model at a time, got {len(things)}; --merge merges sketches")
        if data is None:
            raise ValueError("name the data to run the model on: --data demo, npz:file, folder:path …")
        if is_sketch(things[0]):
            raise ValueError(f"{things[0]} is a sketch already; --merge merges sketches")
        if size is not None:
            options["size"] = opt.parse_size(size)
        result = make(things[0], DataPart(open_data(data, batch=batch or 256), first_row or 0), **options)
    result.save(out)
    how = "every row kept" if result.size is None else f"in {result.size} buckets, seed {result.seed}"
    count = len(result.side.sites)
    typer.echo(f"{result.side.name}: {count} site{'s' * (count != 1)}, {result.n:,} rows {how}")
    typer.echo(f"kept: {', '.join(result.parts)}; gradients of: {result.output}")
    if folded := [site for site, kept in zip(result.side.sites, result.sites, strict=True) if kept.folded is not None]:
        typer.echo(f"projected to fit into the memory: {', '.join(folded)}")
    largest = sorted(zip(result.sites, result.side.sites, strict=True), key=lambda pair: -pair[0].bytes)[:3]
    typer.echo("largest: " + ", ".join(f"{label} {site.bytes / 2**20:.1f} MiB" for site, label in largest))
    sizes = f"{result.bytes / 2**20:.1f} MiB in memory, {out.stat().st_size / 2**20:.1f} in the file"
    typer.echo(f"{sizes}{_peak(device)}\nwrote {out}")


def _peak(device: str | None) -> str:
    """Return the peak memory of the process."""
    text = ""
    if sys.platform != "win32":
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        text = f", peak memory {most / (2**20 if sys.platform == 'darwin' else 2**10):,.0f} MiB"  # macOS counts bytes
    if device is not None and device.startswith("cuda"):
        import torch

        text += f", on the GPU {torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB"
    return text
