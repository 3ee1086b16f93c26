"""`sosie cost`: what measures cost in operations, time and memory."""

from __future__ import annotations

from typing import Annotated

from . import options as opt


def cost(
    model: Annotated[
        str, opt.argument(opt.INPUTS, "MODEL", "A model, e.g. 'alexnet(atoms=9)' or tiny10@weights.safetensors.")
    ],
    model_b: Annotated[str | None, opt.argument(opt.INPUTS, "MODEL_B", "The other.", default="the same model")] = None,
    measures: Annotated[str | None, opt.measures("cca_r2, linear_cka, wcka; for atoms atom_cosine")] = None,
    probes: Annotated[
        str, opt.option(opt.INPUTS, "NUMBERS", "Numbers of inputs, separated by commas.")
    ] = "100,1000,10000",
    data: Annotated[
        str | None, opt.option(opt.INPUTS, "DATA", "Inputs, e.g. demo or cifar10.", default="random ones")
    ] = None,
    shape: opt.Shape = None,
    sites: Annotated[
        str | None,
        opt.option(
            opt.COMPARED, "NAMES", "Sites of both models.", default="layers of atoms, or those of `sosie compare`"
        ),
    ] = None,
    rows: opt.Rows = "positions",
    batch: opt.Batch = 128,
    seed: Annotated[int, opt.option(opt.RUN, "N", "Seed of random inputs and of models without weights.")] = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    out: opt.Out = None,
) -> None:
    """What does a measure cost in operations, time and memory?

    $ sosie cost small_cnn --measures linear_cka --probes 100,1000
    $ sosie cost "small_cnn(atoms=6)" --measures atom_cosine --probes 100

    Measured for a pair of models, as the number of inputs grows.
    """
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
