"""`sosie sketch`: features and gradients of a model in little space."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def sketch(
    things: Annotated[list[str], typer.Argument(metavar="MODEL", help="A model; with --merge, sketches.")],
    out: Annotated[Path, typer.Option(help="The file to write, .safetensors.")],
    data: Annotated[str | None, typer.Option(help="Data to run it on, as for compare.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge sketches of parts of the data instead of making one.")
    ] = False,
    sites: opt.Sites = None,
    size: Annotated[str | None, typer.Option(help="Buckets (512), or all: every row, which is exact.")] = None,
    stack: Annotated[int | None, typer.Option(min=1, help="Number of stacked sketches.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of buckets and signs; one for all sketches.")] = None,
    kernels: Annotated[
        str | None, typer.Option(help="Kernels to supply: features,gradients,hadamard; also maps.")
    ] = None,
    rows: Annotated[str | None, typer.Option(help="flatten, mean, positions, cls or last.")] = None,
    output: Annotated[str | None, typer.Option(help="Output of the model: logits or gaussian.")] = None,
    beta: Annotated[float | None, typer.Option(help="Tempers the predictions for gradients (0.5).")] = None,
    memory: opt.Memory = None,
    first_row: Annotated[
        int | None, typer.Option(min=0, help="Index of the first input, if the data are a part of more.")
    ] = None,
    max_rows: opt.MaxRows = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Inputs per pass (256); does not change values.")] = None,
    device: opt.Device = None,
) -> None:
    """Sketch a model's features and gradients in one pass, for `sosie compare` and `sosie transfer`."""
    from ..data import DataPart, open_data
    from ..sketching import Sketch, is_sketch
    from ..sketching import sketch as make

    if out.suffix != ".safetensors":
        raise ValueError(f"a sketch is written as .safetensors, got --out {out}")
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
    typer.echo(f"{result.bytes / 2**20:.1f} MiB{_peak(device)}\nwrote {out}")


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
