"""`sosie benchmark`: is a measure any good?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as opt


def benchmark(
    measures: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of sosie's, with options (mutual_knn(k=5)), or file.py:function; none: all of sosie's."
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds), small (minutes on a CPU) or paper (a GPU).")] = "smoke",
    out: Annotated[Path, typer.Option(help="The folder where networks, results and the page are kept.")] = Path(
        "benchmark"
    ),
    of: Annotated[
        str | None, typer.Option(help="What your function compares: activations (the default) or models.")
    ] = None,
    closer: Annotated[
        str | None,
        typer.Option(help="up if larger is more alike, else down; found out where your function does not say."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=4, help="Images at most, for slow measures.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of networks, images, attacks and intervals.")] = 0,
    device: opt.Device = None,
    anew: Annotated[bool, typer.Option("--anew", help="Do again what the folder holds already.")] = False,
) -> None:
    """Put measures to the test: calibration, correlation with what networks do, manipulation.

    What is done is kept: interrupted, the same command goes on; with another measure, it joins the others.
    """
    from ..benchmark import run_benchmark
    from ..report import print_leaderboard, write_report

    options: dict[str, Any] = {"of": of, "closer": closer, "rows": rows}
    found = run_benchmark(
        measures or None, scale=scale, folder=out, seed=seed, device=device, resume=not anew, **options
    )
    page = write_report(found, out / "leaderboard.html")
    print_leaderboard(found)
    typer.echo(f"wrote {out / 'leaderboard.json'}\nwrote {page}")
