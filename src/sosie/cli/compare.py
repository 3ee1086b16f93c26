"""`sosie compare`: two models, or more, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .lists import split


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two models or more (tiny10@weights.safetensors, file.py:factory@weights, torchvision:resnet18, "
            "timm:…, hf:folder), saved activations (.npz, .safetensors), or files of saved statistics to merge."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="demo, npz:file, folder:path, cifar10, cifar100, svhn, mnist, fashion-mnist, file.py:factory."
        ),
    ] = None,
    measures: Annotated[str, typer.Option(help="Measures, separated by commas; options in brackets.")] = "debiased_cka",
    sites: Annotated[str | None, typer.Option(help="Sites of both models: names, globs, leaves, blocks.")] = None,
    sites_a: Annotated[str | None, typer.Option(help="Sites of the first model.")] = None,
    sites_b: Annotated[str | None, typer.Option(help="Sites of the second model.")] = None,
    rows: Annotated[str, typer.Option(help="flatten, mean, positions, cls or last.")] = "flatten",
    max_rows: Annotated[int | None, typer.Option(min=1, help="Stop after this many inputs.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Inputs a forward pass; does not change values.")] = 256,
    exact: Annotated[bool, typer.Option("--exact", help="Whole Gram matrices or covariances, not blocks.")] = False,
    block: Annotated[int, typer.Option(min=4, help="Rows a block of Gram matrices.")] = 64,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")] = None,
    precision: Annotated[str | None, typer.Option(help="tf32, float32 or float64.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for statistics, e.g. 4GiB.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampled rows and of models without weights.")] = 0,
    null: Annotated[str | None, typer.Option(help="permutation: what chance gives, and p-values.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Shuffles that p-values rest on.")] = 200,
    interval: Annotated[bool, typer.Option("--interval", help="A 95 % interval for every measure.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Save statistics here on the way, and go on from them.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every layer.")] = False,
) -> None:
    """Compare models layer by layer on the same inputs, in one pass."""
    from .. import engine
    from ..data import open_data
    from ..report import print_comparison, write_report
    from ..results import check_writable

    for path in (out, html, resume):
        check_writable(path)
    found = engine.compare(
        [engine.open_source(text, seed=seed) for text in models],
        None if data is None else open_data(data, batch=batch),
        measures=measures if measures == engine.DEFAULT else split(measures) or [],
        sites_a=split(sites_a or sites),
        sites_b=split(sites_b or (sites if len(models) == 2 else None)),
        rows=rows,
        max_rows=max_rows,
        exact=exact,
        block=block,
        device=device,
        precision=precision,
        memory=memory,
        seed=seed,
        null=null,
        draws=draws,
        interval=interval,
        resume=resume,
    )
    # Files first: a reader of the output that goes away, as `| head` does, must not cost the result.
    written = [found.save(out)] if out is not None else []
    written += [write_report(found, html)] if html is not None else []
    print_comparison(found, full=full)
    for path in written:
        typer.echo(f"wrote {path}")
