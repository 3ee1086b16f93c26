"""`sosie weights`: compare the weights of models, without data."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import options as opt


def weights(
    models: Annotated[list[str], typer.Argument(help=f"{opt.MODELS}.")],
    measures: Annotated[str | None, typer.Option(help="Measures, separated by commas; default: wcka.")] = None,
    sites: opt.Sites = None,
    sites_a: opt.SitesA = None,
    sites_b: opt.SitesB = None,
    shape: opt.Shape = None,
    probes: Annotated[
        int | None, typer.Option(help="Estimate from this many random inputs; default: each entry if memory allows.")
    ] = None,
    null: Annotated[str | None, typer.Option(help="weights: report chance and p-values by shuffled weights.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Number of shuffled copies for p-values.")] = 20,
    match: Annotated[str | None, typer.Option(help="weights: first put neurons into matching order.")] = None,
    joint: Annotated[
        str | None,
        typer.Option(help="For measures of atoms: decompose the models together into so many; or polar."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="For measures of tensors and atoms: the common initial model.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random inputs, of shuffles and of models without weights.")] = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    out: opt.Out = None,
    html: opt.Html = None,
    full: opt.Full = False,
) -> None:
    """Compare weights without data: of the network up to each layer, and from end to end (site `output`)."""
    from ..models import open_model
    from ..weights import compare_weights

    opt.check_outputs(out, html)
    parts: Any = int(joint) if joint is not None and joint.isdecimal() else joint
    if parts is not None and parts != "polar" and not isinstance(parts, int):
        raise ValueError(f"--joint {joint}: a number of atoms, or polar")
    result = compare_weights(
        [open_model(text, seed=seed) for text in models], measures=opt.split(measures),
        sites_a=opt.split(sites_a or sites), sites_b=opt.split(sites_b or (sites if len(models) == 2 else None)),
        match=match, joint=parts, base=base, input_shape=opt.parse_shape(shape), probes=probes, null=null, draws=draws,
        seed=seed, device=device, memory=memory,
    )  # fmt: skip
    opt.tell(result, out, html, full=full)
