"""`sosie outputs`: compare the outputs of models for the same inputs."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as opt


def outputs(
    models: Annotated[
        list[str],
        typer.Argument(help=f"{opt.MODELS}, or predictions (.npz or .safetensors with one array)."),
    ],
    data: opt.Data = None,
    measures: Annotated[
        str | None, typer.Option(help="Measures, separated by commas; default: all that outputs and labels allow.")
    ] = None,
    kind: Annotated[str, typer.Option(help="auto, logits, probabilities, labels or regression.")] = "auto",
    shifts: Annotated[
        str | None,
        typer.Option(
            help="Shifts, separated by commas: clean, fog, fog(severity=5), …, pgd(epsilon=0.1), gaussian; "
            "corruptions and attacks stand for all of them."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random shifts.")] = 0,
    max_rows: opt.MaxRows = None,
    batch: opt.Batch = 256,
    device: opt.Device = None,
    out: opt.Out = None,
    html: opt.Html = None,
    full: opt.Full = False,
) -> None:
    """Compare the outputs of models for the same inputs: agreement, common errors, divergence."""
    from ..data.shifts import open_shifts
    from ..engine import compare_outputs

    opt.check_outputs(out, html)
    opened = None if (names := opt.split(shifts)) is None else open_shifts(names, seed)
    with opt.working_together() as speaks:
        result = compare_outputs(
            models, opt.open_data(data, batch), measures=opt.split(measures), kind=kind, shifts=opened,
            max_rows=max_rows, device=opt.own_device(device),
        )  # fmt: skip
    if speaks:
        opt.tell(result, out, html, full=full)
