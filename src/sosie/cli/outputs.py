"""`sosie outputs`: what models answer to the same inputs."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    MODELS,
    Batch,
    Data,
    Device,
    Html,
    MaxRows,
    Out,
    check_outputs,
    own_device,
    split,
    tell,
    working_together,
)


def outputs(
    models: Annotated[
        list[str],
        typer.Argument(help=f"{MODELS}, or predictions (.npz or .safetensors with one array)."),
    ],
    data: Data = None,
    measures: Annotated[
        str | None, typer.Option(help="Measures, separated by commas; else all that outputs and labels allow.")
    ] = None,
    kind: Annotated[str, typer.Option(help="auto, logits, probabilities, labels or regression.")] = "auto",
    shifts: Annotated[
        str | None,
        typer.Option(
            help="Compare under these, with commas: clean, fog, fog(severity=5), …, pgd(epsilon=0.1), gaussian; "
            "corruptions and attacks stand for all of them."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is random in shifts.")] = 0,
    max_rows: MaxRows = None,
    batch: Batch = 256,
    device: Device = None,
    out: Out = None,
    html: Html = None,
    full: Annotated[bool, typer.Option("--full", help="Of several models, print every pair.")] = False,
) -> None:
    """Compare what models answer to the same inputs: agreement, errors in common, divergence."""
    from ..data import open_data
    from ..data.shifts import open_shifts
    from ..engine import compare_outputs

    check_outputs(out, html)
    opened = None if (names := split(shifts)) is None else open_shifts(names, seed)
    with working_together() as speaks:
        found = compare_outputs(
            models, None if data is None else open_data(data, batch=batch), measures=split(measures), kind=kind,
            shifts=opened, max_rows=max_rows, device=own_device(device),
        )  # fmt: skip
    if speaks:
        tell(found, out, html, full=full)
