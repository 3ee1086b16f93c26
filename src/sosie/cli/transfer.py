"""`sosie transfer`: how much would models have to adapt to data?"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as opt


def transfer(
    models: Annotated[list[str], typer.Argument(help="One model or more, as for compare, or sketches of them.")],
    data: opt.Data = None,
    sites: opt.Sites = None,
    rows: Annotated[str | None, typer.Option(help="flatten, mean, positions, cls or last.")] = None,
    size: Annotated[str | None, typer.Option(help="Columns of sketches (512), or all: every row.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of sketches, and of the rows in pairs.")] = None,
    beta: Annotated[float | None, typer.Option(help="Tempers the predictions for gradients (0.5).")] = None,
    output: Annotated[str | None, typer.Option(help="Output of the models: logits or gaussian.")] = None,
    max_rows: opt.MaxRows = None,
    batch: opt.Batch = 256,
    device: opt.Device = None,
    out: opt.Out = None,
    html: opt.Html = None,
    full: opt.Full = False,
) -> None:
    """Score how much models would have to adapt to data, layer by layer and without labels; least first."""
    from .. import sketching

    opt.check_outputs(out, html)
    options = opt.given(
        sites=opt.split(sites), rows=rows, seed=seed, beta=beta, output=output, max_rows=max_rows, device=device
    )
    if size is not None:
        options["size"] = opt.parse_size(size)
    result = sketching.transfer(models if len(models) > 1 else models[0], opt.open_data(data, batch), **options)
    opt.tell(result, out, html, full=full)
