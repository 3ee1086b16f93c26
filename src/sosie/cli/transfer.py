"""`sosie transfer`: how much would models have to adapt to data?"""

from __future__ import annotations

from typing import Annotated, Any

from . import options as opt


def transfer(
    models: Annotated[
        list[str], opt.argument(opt.INPUTS, "MODEL", "One model or more, as for compare, or sketches of them.")
    ],
    data: opt.Data = None,
    sites: opt.Sites = None,
    rows: opt.SketchRows = None,
    size: opt.Size = None,
    seed: Annotated[int | None, opt.seed("sketches, and of the rows in pairs", "0")] = None,
    beta: opt.Beta = None,
    output: opt.Output = None,
    max_rows: opt.MaxRows = None,
    batch: opt.Batch = 256,
    device: opt.Device = None,
    out: opt.Out = None,
    html: opt.Html = None,
    full: opt.Full = False,
) -> None:
    """How much would each model have to adapt to my data?

    $ sosie transfer small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors --data demo
    $ sosie transfer "small_cnn(seed=0)" --data demo --sites "relu*" --size all

    Scored layer by layer and without labels; the model that would adapt least comes first.
    """
    from .. import sketching

    opt.check_outputs(out, html)
    options = opt.given(
        sites=opt.split(sites), rows=rows, seed=seed, beta=beta, output=output, max_rows=max_rows, device=device
    )
    if size is not None:
        options["size"] = opt.parse_size(size)
    models, names = opt.split_names(models)
    things: Any = models if len(models) > 1 else models[0]
    result = sketching.transfer(things, opt.open_data(data, batch), names=names, **options)
    opt.tell(result, out, html, full=full)
