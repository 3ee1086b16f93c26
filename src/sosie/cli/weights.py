"""`sosie weights`: what models are made of, without data."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .options import MODELS, Device, Full, Html, Out, SitesA, SitesB, check_outputs, parse_shape, split, tell


def weights(
    models: Annotated[list[str], typer.Argument(help=f"{MODELS}.")],
    measures: Annotated[str | None, typer.Option(help="Measures, separated by commas; else wcka.")] = None,
    sites: Annotated[
        str | None,
        typer.Option(help="Sites of both models: names, globs, leaves, blocks; output is the whole network."),
    ] = None,
    sites_a: SitesA = None,
    sites_b: SitesB = None,
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
    device: Device = None,
    memory: Annotated[str | None, typer.Option(help="Budget for the maps, e.g. 8GiB.")] = None,
    out: Out = None,
    html: Html = None,
    full: Full = False,
) -> None:
    """Compare what models are made of: no data, the network up to each layer and from end to end."""
    from ..models import open_model
    from ..weights import compare_weights

    check_outputs(out, html)
    parts: Any = int(joint) if joint is not None and joint.isdecimal() else joint
    if parts is not None and parts != "polar" and not isinstance(parts, int):
        raise ValueError(f"--joint {joint}: a number of atoms, or polar")
    found = compare_weights(
        [open_model(text, seed=seed) for text in models], measures=split(measures), sites_a=split(sites_a or sites),
        sites_b=split(sites_b or (sites if len(models) == 2 else None)), match=match, joint=parts, base=base,
        input_shape=parse_shape(shape), probes=probes, null=null, draws=draws, seed=seed, device=device, memory=memory,
    )  # fmt: skip
    tell(found, out, html, full=full)
