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
            help="Measures of sosie, with options (mutual_knn(k=5)), or file.py:function; default: all of sosie's."
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds), small (minutes on a CPU) or paper (a GPU).")] = "smoke",
    out: Annotated[Path, typer.Option(help="The folder for networks, results and the page.")] = Path("benchmark"),
    of: Annotated[
        str | None, typer.Option(help="What your function compares: activations (the default) or models.")
    ] = None,
    closer: Annotated[
        str | None,
        typer.Option(help="up if larger is more alike, else down; default: measured."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=4, help="Images at most, for slow measures.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of networks, images, attacks and intervals.")] = 0,
    device: opt.Device = None,
    anew: Annotated[bool, typer.Option("--anew", help="Ignore the results in the folder.")] = False,
) -> None:
    """Test measures: calibration, correlation with what networks do, manipulation.

    Finished parts are kept: after an interruption the same command goes on, and new measures join the others.
    """
    from ..benchmark import run_benchmark
    from ..report import print_leaderboard, write_report

    options: dict[str, Any] = {"of": of, "closer": closer, "rows": rows}
    leaderboard = run_benchmark(
        measures or None, scale=scale, folder=out, seed=seed, device=device, resume=not anew, **options
    )
    page = write_report(leaderboard, out / "leaderboard.html")
    print_leaderboard(leaderboard)
    typer.echo(f"wrote {out / 'leaderboard.json'}\nwrote {page}")
