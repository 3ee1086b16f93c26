"""`sosie outputs`: compare the outputs of models for the same inputs."""

from __future__ import annotations

from typing import Annotated

from . import options as opt


def outputs(
    models: Annotated[
        list[str],
        opt.argument(opt.INPUTS, "MODEL", f"{opt.MODELS}; also predictions (.npz or .safetensors with one array)."),
    ],
    data: opt.Data = None,
    measures: Annotated[str | None, opt.measures("all that outputs and labels allow")] = None,
    kind: Annotated[
        str, opt.option(opt.COMPARED, "KIND", "What the outputs are: logits, probabilities, labels or regression.")
    ] = "auto",
    shifts: Annotated[
        str | None,
        opt.option(
            opt.INPUTS,
            "NAMES",
            "Shifted inputs, separated by commas: clean, fog, fog(severity=5), …, pgd(epsilon=0.1), gaussian; "
            "corruptions and attacks stand for all of them.",
        ),
    ] = None,
    seed: Annotated[int, opt.option(opt.RUN, "N", "Seed of random shifts.")] = 0,
    max_rows: opt.MaxRows = None,
    batch: opt.Batch = 256,
    device: opt.Device = None,
    out: opt.Out = None,
    html: opt.Html = None,
    full: opt.Full = False,
) -> None:
    """Do models give the same answers and make the same errors?

    $ sosie outputs small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors --data demo
    $ sosie outputs small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors --data demo --shifts "clean,fog"
    """
    from ..data.shifts import open_shifts
    from ..engine import compare_outputs

    opt.check_outputs(out, html)
    opened = None if (chosen := opt.split(shifts)) is None else open_shifts(chosen, seed)
    models, names = opt.split_names(models)
    with opt.working_together() as speaks:
        result = compare_outputs(
            models, opt.open_data(data, batch), measures=opt.split(measures), kind=kind, shifts=opened,
            names=names, max_rows=max_rows, device=opt.own_device(device),
        )  # fmt: skip
    if speaks:
        opt.tell(result, out, html, full=full)
