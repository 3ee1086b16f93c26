"""`sosie stitch`: can B do its job with A's representation?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as opt


def stitch(
    model_a: Annotated[str, typer.Argument(help="The network that gives the lower part.")],
    model_b: Annotated[str, typer.Argument(help="The network that gives the upper part.")],
    data: Annotated[str, typer.Option(help="Data to fit the joining layer on, as for compare.")],
    site: Annotated[
        str | None, typer.Option(help="Where A ends, and B begins unless --site-b says otherwise; or --all-sites.")
    ] = None,
    site_b: Annotated[str | None, typer.Option(help="Where B begins.")] = None,
    all_sites: Annotated[bool, typer.Option("--all-sites", help="Stitch at every layer, from one pass.")] = False,
    sites: Annotated[str | None, typer.Option(help="With --all-sites: names, globs, leaves, blocks.")] = None,
    sites_a: Annotated[str | None, typer.Option(help="With --all-sites: those of A, if they differ.")] = None,
    sites_b: Annotated[str | None, typer.Option(help="With --all-sites: those of B, if they differ.")] = None,
    pairs: Annotated[str, typer.Option(help="With --all-sites: diagonal, or all pairs of layers.")] = "diagonal",
    measures: Annotated[
        str, typer.Option(help="With --all-sites: measures to show beside.")
    ] = "linear_cka,regression_r2",
    fit: Annotated[
        str,
        typer.Option(
            help="least_squares, ridge(strength=…), procrustes, reduced_rank(k=…), permutation, lasso(alpha=…), "
            "identity, or training: \"task_loss(epochs=10, start='random')\"."
        ),
    ] = "least_squares",
    precision: Annotated[str, typer.Option(help="Precision of the products: float32 or float64.")] = "float32",
    resize: Annotated[str, typer.Option(help="interpolate or pool, if maps differ in size.")] = "interpolate",
    split: Annotated[str, typer.Option(help="The part of the data set to fit on.")] = "train",
    test: Annotated[str | None, typer.Option(help="Data to evaluate on; default: the test part of --data.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Inputs to fit on, and to evaluate on.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Inputs per forward pass.")] = 256,
    save: Annotated[Path | None, typer.Option(help="With --site: write the stitch, as safetensors.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --all-sites: write the result as JSON.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", "--html", help="With --all-sites: write a page to look at.")
    ] = None,
) -> None:
    """Join A up to a site with B from a site on by an affine layer, and evaluate how well it does B's job."""
    from .. import stitching
    from ..data import open_data
    from ..report import print_numbers

    if (site is None) != all_sites:
        raise ValueError("name the place to stitch: --site NAME or --all-sites, not both")
    all_only = {"--sites": sites, "--sites-a": sites_a, "--sites-b": sites_b, "--out": out, "--report": report}
    refused = all_only if site else {"--site-b": site_b, "--save": save}
    if wrong := [name for name, value in refused.items() if value is not None]:
        raise ValueError(f"{', '.join(wrong)}: only {'with' if site else 'without'} --all-sites")
    opt.check_outputs(save, out, report)
    fitted = open_data(data, split=split, batch=batch, limit=max_rows)
    held_out = open_data(test or data, batch=batch, limit=max_rows)
    options: dict[str, Any] = {"fit": fit, "precision": precision, "resize": resize}
    if all_sites:
        options |= {"sites_a": opt.split(sites_a or sites), "sites_b": opt.split(sites_b or sites)}
        options |= {"pairs": pairs, "measures": opt.split(measures)}
        opt.tell(stitching.stitch_sites(model_a, model_b, fitted, test=held_out, **options), out, report)
        return
    assert site is not None
    stitched = stitching.stitch(model_a, site, model_b, site_b or site, fitted, **options)
    assert isinstance(stitched, stitching.Stitch)  # one fit, one stitch
    written = None if save is None else stitched.save(save)
    numbers = {f"fit: {key}": value for key, value in stitched.report.items()} | stitched.evaluate(held_out)
    print_numbers(f"{stitched.fit} from {site} of A to {site_b or site} of B", numbers)
    for caveat in stitched.caveats:
        typer.echo(f"note: {caveat}")
    if written is not None:
        typer.echo(f"wrote {written}")
