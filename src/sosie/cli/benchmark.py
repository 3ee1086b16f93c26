"""`sosie benchmark`: is a measure any good?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as opt


def benchmark(
    measures: Annotated[
        list[str] | None,
        opt.argument(
            opt.INPUTS,
            "MEASURE",
            "Measures of sosie, with options (mutual_knn(k=5)), or your own, file.py:function.",
            default="all of sosie's",
        ),
    ] = None,
    scale: Annotated[
        str, opt.option(opt.RUN, "SCALE", "smoke (seconds), small (minutes on a CPU) or paper (a GPU).")
    ] = "smoke",
    out: Annotated[Path, opt.option(opt.OUTPUT, "FOLDER", "The folder for networks, results and the page.")] = Path(
        "benchmark"
    ),
    of: Annotated[
        str | None,
        opt.option(opt.INPUTS, "KIND", "What your function compares: activations or models.", default="activations"),
    ] = None,
    closer: Annotated[
        str | None,
        opt.option(
            opt.INPUTS, "DIRECTION", "Of your function: up if larger is more alike, else down.", default="measured"
        ),
    ] = None,
    rows: Annotated[
        int | None, opt.option(opt.INPUTS, "N", "Images at most, for slow measures.", default="all", min=4)
    ] = None,
    seed: Annotated[int, opt.option(opt.RUN, "N", "Seed of networks, images, attacks and intervals.", min=0)] = 0,
    device: Annotated[
        str | None, opt.option(opt.RUN, "DEVICE", "Compute on cpu, cuda, cuda:1 …", default="cpu")
    ] = None,
    anew: Annotated[bool, opt.flag(opt.RUN, "--anew", "Ignore the results in the folder.")] = False,
) -> None:
    """Is this similarity measure any good, or mine?

    $ sosie benchmark linear_cka procrustes_angle
    $ sosie benchmark mine.py:measure --closer up --out mine

    Measures are tested for calibration, correlation with what networks do, and manipulation. Finished parts are kept:
    after an interruption the same command goes on, and new measures join the others.
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
