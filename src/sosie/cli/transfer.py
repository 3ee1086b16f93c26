"""`sosie transfer`: how much would models have to adapt to data?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import split
from .sketch import size_of


def transfer(
    models: Annotated[list[str], typer.Argument(help="One model or more, as for compare, or sketches of them.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="demo, npz:file, folder:path, cifar10, cifar100, svhn, mnist, fashion-mnist, file.py:factory."
        ),
    ] = None,
    sites: Annotated[str | None, typer.Option(help="Sites of all models: names, globs, leaves, blocks.")] = None,
    rows: Annotated[str | None, typer.Option(help="flatten, mean, positions, cls or last.")] = None,
    size: Annotated[str | None, typer.Option(help="Columns of sketches (512), or all: keep every row.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of sketches, and of the rows that pairs are of.")] = None,
    beta: Annotated[float | None, typer.Option(help="Tempers the prediction that gradients are of (0.5).")] = None,
    output: Annotated[str | None, typer.Option(help="What the models answer: logits or gaussian.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Stop after this many inputs.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Inputs a pass; does not change values.")] = 256,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every layer, of several models too.")] = False,
) -> None:
    """Score how much models would have to adapt to data, layer by layer and without labels; least first."""
    from .. import sketching
    from ..data import open_data
    from ..files import check_writable
    from ..report import print_comparison, write_report

    for path in (out, html):
        check_writable(path)
    options: dict[str, Any] = {"sites": split(sites), "rows": rows, "seed": seed, "beta": beta, "output": output}
    options |= {"max_rows": max_rows, "device": device}
    given = {name: value for name, value in options.items() if value is not None}
    if size is not None:
        given["size"] = size_of(size)
    found = sketching.transfer(
        models if len(models) > 1 else models[0], None if data is None else open_data(data, batch=batch), **given
    )
    # Files first: a reader of the output that goes away, as `| head` does, must not cost the result.
    written = [found.save(out)] if out is not None else []
    written += [write_report(found, html)] if html is not None else []
    print_comparison(found, full=full)
    for path in written:
        typer.echo(f"wrote {path}")
