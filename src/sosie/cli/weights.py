"""`sosie weights`: what models are made of, without data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import split


def weights(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two models or more (tiny10@weights.safetensors, file.py:factory@weights, torchvision:resnet18, "
            "timm:…, hf:folder)."
        ),
    ],
    measures: Annotated[str | None, typer.Option(help="Measures, separated by commas; else wcka.")] = None,
    sites: Annotated[
        str | None,
        typer.Option(help="Sites of both models: names, globs, leaves, blocks; output is the whole network."),
    ] = None,
    sites_a: Annotated[str | None, typer.Option(help="Sites of the first model.")] = None,
    sites_b: Annotated[str | None, typer.Option(help="Sites of the second model.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of one input, e.g. 3x32x32; else the first layer is asked.")
    ] = None,
    probes: Annotated[
        int | None, typer.Option(help="Estimate from this many random inputs; else each entry where memory allows.")
    ] = None,
    null: Annotated[str | None, typer.Option(help="weights: what shuffled weights give, and p-values.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Shuffled copies that p-values rest on.")] = 20,
    match: Annotated[str | None, typer.Option(help="weights: neurons are first put into matching order.")] = None,
    joint: Annotated[
        str | None, typer.Option(help="For measures of atoms: decompose the models together, into so many; or polar.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="For measures of tensors and atoms: the model that all started from.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random inputs, of shuffles and of models without weights.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for the maps, e.g. 8GiB.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every layer.")] = False,
) -> None:
    """Compare what models are made of: no data, the network up to each layer and from end to end."""
    from ..files import check_writable
    from ..models import open_model
    from ..report import print_comparison, write_report
    from ..weights import compare_weights
    from .sites import parse_shape

    for path in (out, html):
        check_writable(path)
    found = compare_weights(
        [open_model(text, seed=seed) for text in models],
        measures=None if measures is None else split(measures) or [],
        sites_a=split(sites_a or sites),
        sites_b=split(sites_b or (sites if len(models) == 2 else None)),
        match=match,
        joint=_joint(joint),
        base=base,
        input_shape=None if shape is None else parse_shape(shape),
        probes=probes,
        null=null,
        draws=draws,
        seed=seed,
        device=device,
        memory=memory,
    )
    # Files first: a reader of the output that goes away, as `| head` does, must not cost the result.
    written = [found.save(out)] if out is not None else []
    written += [write_report(found, html)] if html is not None else []
    print_comparison(found, full=full)
    for path in written:
        typer.echo(f"wrote {path}")


def _joint(text: str | None) -> Any:
    if text is None or text == "polar":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--joint {text}: a number of atoms, or polar") from None
