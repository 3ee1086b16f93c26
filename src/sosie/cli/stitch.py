"""`sosie stitch`: can B do its job with A's representation?"""

from __future__ import annotations

from typing import Annotated

import typer


def stitch(
    model_a: Annotated[str, typer.Argument(help="The network whose lower part is taken.")],
    model_b: Annotated[str, typer.Argument(help="The network whose upper part is taken.")],
    site: Annotated[str, typer.Option(help="Where A ends, and B begins unless --site-b says otherwise.")],
    data: Annotated[str, typer.Option(help="Data that the layer between them is fitted on, as for compare.")],
    site_b: Annotated[str | None, typer.Option(help="Where B begins.")] = None,
    fit: Annotated[
        str,
        typer.Option(
            help="least_squares, ridge(strength=…), procrustes, reduced_rank(k=…), permutation, lasso(alpha=…), "
            "task_loss(epochs=…) …"
        ),
    ] = "least_squares",
    resize: Annotated[str, typer.Option(help="interpolate or pool, where maps differ in size.")] = "interpolate",
    split: Annotated[str, typer.Option(help="Which part of the data set the layer is fitted on.")] = "train",
    test: Annotated[str | None, typer.Option(help="Data to evaluate on; else the data set's test part.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Inputs to fit on, and to evaluate on.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Inputs that are read at a time.")] = 256,
) -> None:
    """Join A up to a site to B from a site on by an affine layer, and see how well the whole does B's job."""
    from .. import engine
    from ..data import open_data
    from ..report import print_numbers

    found = engine.stitch(
        model_a,
        site,
        model_b,
        site_b or site,
        open_data(data, split=split, batch=batch, limit=max_rows),
        fit=fit,
        resize=resize,  # type: ignore[arg-type]
    )
    assert isinstance(found, engine.Stitch)  # one fit, one stitch
    held_out = open_data(test or data, batch=batch, limit=max_rows)
    numbers = {f"fit: {key}": value for key, value in found.report.items()}
    print_numbers(f"{found.fit} from {site} of A to {site_b or site} of B", {**numbers, **found.evaluate(held_out)})
