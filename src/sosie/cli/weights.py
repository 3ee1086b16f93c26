"""`sosie weights`: compare the weights of models, without data."""

from __future__ import annotations

from typing import Annotated, Any

from . import options as opt


def weights(
    models: Annotated[list[str], opt.argument(opt.INPUTS, "MODEL", f"{opt.MODELS}.")],
    measures: Annotated[str | None, opt.measures("wcka")] = None,
    sites: opt.Sites = None,
    sites_a: opt.SitesA = None,
    sites_b: opt.SitesB = None,
    shape: opt.Shape = None,
    probes: Annotated[
        int | None,
        opt.option(
            opt.SURE, "N", "Estimate from this many random inputs.", default="each entry of the input, if memory allows"
        ),
    ] = None,
    null: Annotated[
        str | None, opt.option(opt.SURE, "KIND", "weights: also report chance and p-values, by shuffled weights.")
    ] = None,
    draws: Annotated[int, opt.option(opt.SURE, "N", "Number of shuffled copies for p-values.", min=1)] = 20,
    match: Annotated[
        str | None, opt.option(opt.COMPARED, "KIND", "weights: first put neurons into matching order.")
    ] = None,
    joint: Annotated[
        str | None,
        opt.option(opt.COMPARED, "N", "For measures of atoms: decompose the models together into this many; or polar."),
    ] = None,
    base: Annotated[
        str | None, opt.option(opt.INPUTS, "MODEL", "For measures of tensors and atoms: the common initial model.")
    ] = None,
    seed: Annotated[int, opt.seed("random inputs, of shuffles and of models without weights")] = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    out: opt.Out = None,
    html: opt.Html = None,
    full: opt.Full = False,
) -> None:
    """How close are the weights of models, without any data?

    $ sosie weights small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors
    $ sosie weights small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors --measures weight_cosine --match weights

    Networks are compared up to each layer, and from end to end (site `output`).
    """
    from ..models import open_model
    from ..weights import compare_weights

    opt.check_outputs(out, html)
    parts: Any = int(joint) if joint is not None and joint.isdecimal() else joint
    if parts is not None and parts != "polar" and not isinstance(parts, int):
        raise ValueError(f"--joint {joint}: a number of atoms, or polar")
    models, names = opt.split_names(models)
    result = compare_weights(
        [open_model(text, seed=seed) for text in models], measures=opt.split(measures), names=names,
        sites=opt.split(sites), sites_a=opt.split(sites_a), sites_b=opt.split(sites_b),
        match=match, joint=parts, base=base, input_shape=opt.parse_shape(shape), probes=probes, null=null, draws=draws,
        seed=seed, device=device, memory=memory,
    )  # fmt: skip
    opt.tell(result, out, html, full=full)
