"""`sosie cost`: what measures cost in operations, time and memory."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as opt


def cost(
    model: Annotated[str, typer.Argument(help="A model, e.g. 'alexnet(atoms=9)' or tiny10@weights.safetensors.")],
    model_b: Annotated[str | None, typer.Argument(help="The other; default: the same model.")] = None,
    measures: Annotated[
        str | None,
        typer.Option(help="Measures, separated by commas; default: cca_r2, linear_cka, wcka; for atoms atom_cosine."),
    ] = None,
    probes: Annotated[str, typer.Option(help="Numbers of inputs, separated by commas.")] = "100,1000,10000",
    data: Annotated[str | None, typer.Option(help="Inputs, e.g. demo or cifar10; default: random ones.")] = None,
    shape: opt.Shape = None,
    sites: Annotated[
        str | None, typer.Option(help="Sites of both models; default: layers of atoms, or those of `sosie compare`.")
    ] = None,
    rows: opt.Rows = "positions",
    batch: opt.Batch = 128,
    seed: Annotated[int, typer.Option(help="Seed of random inputs and of models without weights.")] = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    out: opt.Out = None,
) -> None:
    """Measure what measures cost for a pair of models: FLOPs, time and memory, as the number of inputs grows."""
    from .. import benchmark

    opt.check_outputs(out)
    numbers = opt.split(probes) or []
    if not all(number.replace("_", "").isdecimal() for number in numbers):
        raise ValueError(f"--probes: numbers of inputs separated by commas, such as 100,1000; got {probes!r}")
    costs = benchmark.cost(
        model, model_b, opt.split(measures), data, input_shape=opt.parse_shape(shape), probes=list(map(int, numbers)),
        sites=opt.split(sites), rows=rows, batch=batch, seed=seed, device=device, memory=memory,
    )  # fmt: skip
    opt.tell(costs, out)
