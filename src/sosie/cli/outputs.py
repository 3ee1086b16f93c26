"""`sosie outputs`: what models answer to the same inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import own_device, split, working_together


def outputs(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two models or more (tiny10@weights.safetensors, file.py:factory@weights, torchvision:resnet18, "
            "timm:…, hf:folder), or predictions (.npz or .safetensors with one array)."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="demo, npz:file, folder:path, cifar10, cifar100, svhn, mnist, fashion-mnist, file.py:factory."
        ),
    ] = None,
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
    max_rows: Annotated[int | None, typer.Option(min=1, help="Stop after this many inputs.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Inputs a forward pass; does not change values.")] = 256,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Of several models, print every pair.")] = False,
) -> None:
    """Compare what models answer to the same inputs: agreement, errors in common, divergence."""
    from ..data import open_data
    from ..engine import compare_outputs
    from ..files import check_writable
    from ..report import print_comparison, write_report

    for path in (out, html):
        check_writable(path)
    with working_together() as speaks:
        found = compare_outputs(
            models,
            None if data is None else open_data(data, batch=batch),
            measures=split(measures),
            kind=kind,
            shifts=split(shifts),
            seed=seed,
            max_rows=max_rows,
            device=own_device(device),
        )
    if not speaks:
        return
    # Files first: a reader of the output that goes away, as `| head` does, must not cost the result.
    written = [found.save(out)] if out is not None else []
    written += [write_report(found, html)] if html is not None else []
    print_comparison(found, full=full)
    for path in written:
        typer.echo(f"wrote {path}")
