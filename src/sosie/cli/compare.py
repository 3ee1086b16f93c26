"""`sosie compare`: two models, or more, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import own_device, split, working_together

if TYPE_CHECKING:
    from ..results import Comparison, Comparisons


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two models or more (tiny10@weights.safetensors, file.py:factory@weights, torchvision:resnet18, "
            "timm:…, hf:folder), saved activations (.npz, .safetensors), sketches, or files of statistics to merge."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="demo, npz:file, folder:path, cifar10, cifar100, svhn, mnist, fashion-mnist, file.py:factory."
        ),
    ] = None,
    measures: Annotated[
        str | None,
        typer.Option(
            help="Measures, separated by commas; options in brackets. Else debiased_cka; of sketches linear_cka.",
            show_default=False,
        ),
    ] = None,
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
    kernel: Annotated[
        str | None, typer.Option(help="Of sketches: hadamard, features, gradients, sum, maps, midpoint.")
    ] = None,
    unpaired: Annotated[bool, typer.Option("--unpaired", help="Two sketches that share no rows.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Save statistics here on the way, and go on from them.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every layer.")] = False,
) -> None:
    """Compare models layer by layer on the same inputs, in one pass."""
    from .. import engine, sketching
    from ..data import open_data
    from ..files import check_writable

    for path in (out, html, resume):
        check_writable(path)
    if unpaired or any(map(sketching.is_sketch, models)):
        if unpaired and len(models) != 2:
            raise ValueError(f"--unpaired compares two sketches, got {len(models)}")
        _of_sketches(
            models,
            {"--data": data, "--sites": sites, "--sites-a": sites_a, "--sites-b": sites_b, "--max-rows": max_rows}
            | {"--device": device, "--precision": precision, "--memory": memory, "--resume": resume}
            | {"--exact": exact or None, "--interval": interval or None},
        )
    if unpaired:
        chance = draws if null is not None else None
        asked = sketching.UNPAIRED if measures is None else split(measures) or []
        between = sketching.compare_unpaired(
            *models, measures=asked, kernel=kernel or sketching.KERNEL, draws=chance, seed=seed
        )
        _tell(between, out, html, full)
        return
    with working_together() as speaks:
        found = engine.compare(
            [engine.open_source(text, seed=seed) for text in models],
            None if data is None else open_data(data, batch=batch),
            measures=None if measures is None else split(measures) or [],
            sites=split(sites),
            sites_a=split(sites_a),
            sites_b=split(sites_b),
            rows=rows,
            max_rows=max_rows,
            exact=exact,
            block=block,
            device=own_device(device),
            precision=precision,
            memory=memory,
            seed=seed,
            null=null,
            draws=draws,
            interval=interval,
            kernel=kernel,
            resume=resume,
        )
    if speaks:
        _tell(found, out, html, full)


def _of_sketches(things: list[str], options: Mapping[str, object]) -> None:
    """Complain about what is no sketch, and about what was settled when the sketches were made."""
    from .. import sketching

    if others := [thing for thing in things if not sketching.is_sketch(thing)]:
        raise ValueError(f"sketches are compared with sketches: {', '.join(others)} is none; `sosie sketch` makes them")
    if wrong := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{', '.join(wrong)}: not for sketches, which hold what they were made with")


def _tell(found: Comparison | Comparisons, out: Path | None, html: Path | None, full: bool) -> None:
    from ..report import print_comparison, write_report

    # Files first: a reader of the output that goes away, as `| head` does, must not cost the result.
    written = [found.save(out)] if out is not None else []
    written += [write_report(found, html)] if html is not None else []
    print_comparison(found, full=full)
    for path in written:
        typer.echo(f"wrote {path}")
