"""`sosie stitch`: can B do its job with A's representation?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as opt


def stitch(
    model_a: Annotated[str, opt.argument(opt.INPUTS, "MODEL_A", "The network that gives the lower part.")],
    model_b: Annotated[str, opt.argument(opt.INPUTS, "MODEL_B", "The network that gives the upper part.")],
    data: Annotated[str, opt.option(opt.INPUTS, "DATA", "Data to fit the joining layer on, as for compare.")],
    site: Annotated[
        str | None,
        opt.option(opt.COMPARED, "NAME", "Where A ends, and B begins unless --site-b says otherwise; or --all-sites."),
    ] = None,
    site_b: Annotated[str | None, opt.option(opt.COMPARED, "NAME", "Where B begins.")] = None,
    all_sites: Annotated[bool, opt.flag(opt.COMPARED, "--all-sites", "Stitch at every layer, from one pass.")] = False,
    sites: Annotated[str | None, opt.option(opt.EVERY, "NAMES", "Names, globs, leaves, blocks.")] = None,
    sites_a: Annotated[str | None, opt.option(opt.EVERY, "NAMES", "Those of A, if they differ.")] = None,
    sites_b: Annotated[str | None, opt.option(opt.EVERY, "NAMES", "Those of B, if they differ.")] = None,
    pairs: Annotated[str, opt.option(opt.EVERY, "WHICH", "diagonal, or all pairs of layers.")] = "diagonal",
    measures: Annotated[str, opt.option(opt.EVERY, "NAMES", "Measures to show beside.")] = "linear_cka,regression_r2",
    fit: Annotated[
        str,
        opt.option(
            opt.COMPARED,
            "FIT",
            "least_squares, ridge(strength=…), procrustes, reduced_rank(k=…), permutation, lasso(alpha=…), "
            "identity, or training: \"task_loss(epochs=10, start='random')\".",
        ),
    ] = "least_squares",
    precision: Annotated[
        str, opt.option(opt.RUN, "PRECISION", "Precision of the products: float32 or float64.")
    ] = "float32",
    resize: Annotated[
        str, opt.option(opt.COMPARED, "HOW", "interpolate or pool, if maps differ in size.")
    ] = "interpolate",
    split: Annotated[str, opt.option(opt.INPUTS, "SPLIT", "The part of the data set to fit on.")] = "train",
    test: Annotated[
        str | None, opt.option(opt.INPUTS, "DATA", "Data to evaluate on.", default="the test part of --data")
    ] = None,
    max_rows: Annotated[
        int | None, opt.option(opt.INPUTS, "N", "Inputs to fit on, and to evaluate on.", default="all", min=1)
    ] = None,
    batch: opt.Batch = 256,
    save: Annotated[Path | None, opt.file("With --site: write the stitch, as .safetensors.", opt.TENSORS)] = None,
    out: Annotated[
        Path | None,
        opt.file("With --all-sites: write the result as JSON.", opt.JSON),
    ] = None,
    report: Annotated[
        Path | None,
        opt.file("With --all-sites: write a page to look at.", opt.PAGE, "--html", "--report"),
    ] = None,
) -> None:
    """Can B do its job with A's representation?

    $ sosie stitch small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors --site relu2 --data demo
    $ sosie stitch small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors --all-sites --data demo --html s.html

    A runs up to the site, an affine layer fitted on data joins it to B, and B runs from the site on.
    """
    from .. import stitching
    from ..data import open_data
    from ..report import print_numbers

    if (site is None) != all_sites:
        raise ValueError("name the place to stitch: --site NAME or --all-sites, not both")
    all_only = {"--sites": sites, "--sites-a": sites_a, "--sites-b": sites_b, "--out": out, "--html": report}
    refused = all_only if site else {"--site-b": site_b, "--save": save}
    if wrong := [name for name, value in refused.items() if value is not None]:
        raise ValueError(f"{', '.join(wrong)}: only {'with' if site else 'without'} --all-sites")
    opt.check_outputs(save, out, report)
    (model_a, model_b), names = opt.split_names([model_a, model_b])
    fitted = open_data(data, split=split, batch=batch, max_rows=max_rows)
    held_out = open_data(test or data, batch=batch, max_rows=max_rows)
    options: dict[str, Any] = {"fit": fit, "precision": precision, "resize": resize}
    if all_sites:
        options |= {"sites": opt.split(sites), "sites_a": opt.split(sites_a), "sites_b": opt.split(sites_b)}
        options |= {"pairs": pairs, "measures": opt.split(measures)}
        opt.tell(stitching.stitch_sites(model_a, model_b, fitted, test=held_out, names=names, **options), out, report)
        return
    assert site is not None
    stitched = stitching.stitch(model_a, site, model_b, site_b or site, fitted, **options)
    assert isinstance(stitched, stitching.Stitch)  # one fit, one stitch
    written = None if save is None else stitched.save(save)
    numbers = {f"fit: {key}": value for key, value in stitched.report.items()} | stitched.evaluate(held_out)
    name_a, name_b = (name or letter for name, letter in zip(names or (None, None), "AB", strict=True))
    print_numbers(f"{stitched.fit} from {site} of {name_a} to {site_b or site} of {name_b}", numbers)
    for caveat in stitched.caveats:
        typer.echo(f"note: {caveat}")
    if written is not None:
        typer.echo(f"wrote {written}")
