"""`sosie cost`: what measures take, in operations, time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import split


def cost(
    model: Annotated[str, typer.Argument(help="A model, e.g. 'alexnet(atoms=9)' or tiny10@weights.safetensors.")],
    model_b: Annotated[str | None, typer.Argument(help="The other; else the model meets itself.")] = None,
    measures: Annotated[
        str | None,
        typer.Option(help="Measures, separated by commas; else cca_r2, linear_cka, wcka, and of atoms atom_cosine."),
    ] = None,
    probes: Annotated[str, typer.Option(help="Numbers of inputs, separated by commas.")] = "100,1000,10000",
    data: Annotated[str | None, typer.Option(help="Inputs from here, e.g. demo or cifar10; else random ones.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of one random input, e.g. 3x32x32; else the first layer is asked.")
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="Sites of both models; else layers of atoms, or what `sosie compare` takes.")
    ] = None,
    rows: Annotated[str, typer.Option(help="flatten, mean, positions, cls or last.")] = "positions",
    batch: Annotated[int, typer.Option(min=1, help="Inputs a forward pass.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of random inputs and of models without weights.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for statistics, e.g. 4GiB.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Tell what measures cost for a pair of models: FLOPs, time and memory, as the number of inputs grows."""
    from .. import benchmark
    from ..files import check_writable
    from ..report import print_costs
    from .sites import parse_shape

    check_writable(out)
    found = benchmark.cost(
        model,
        model_b,
        None if measures is None else split(measures) or [],
        data,
        input_shape=None if shape is None else parse_shape(shape),
        probes=_numbers(probes),
        sites=split(sites),
        rows=rows,
        batch=batch,
        seed=seed,
        device=device,
        memory=memory,
    )
    written = None if out is None else found.save(out)
    print_costs(found)
    if written is not None:
        typer.echo(f"wrote {written}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part.replace("_", "")) for part in split(text) or []]
    except ValueError as error:
        raise ValueError(f"--probes: numbers of inputs separated by commas, as 100,1000; got {text!r}") from error
