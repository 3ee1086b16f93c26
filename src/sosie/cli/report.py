"""`sosie report`: show a saved comparison again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Full, show


def report(
    file: Annotated[Path, typer.Argument(help="What --out of a verb, or save of a result, wrote.")],
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write heat map and curves as .svg or .png, one file a measure, by this name."),
    ] = None,
    full: Full = False,
) -> None:
    """Print a saved comparison as tables, and write its page or plots."""
    from ..report import write_plots, write_report
    from ..results import Answer, Costs, Dynamics, load

    found: Any = load(file)
    if isinstance(found, Costs) and (html is not None or plot is not None):
        raise ValueError("costs are a table on the terminal: --html and --plot are for comparisons")
    if isinstance(found, (Answer, Dynamics)) and plot is not None:
        what = "of what a zoo answered" if isinstance(found, Answer) else "for dynamics"
        raise ValueError(f"--plot draws comparisons; {what} write the page with --html")
    written = [write_report(found, html)] if html is not None else []
    written += write_plots(found, plot) if plot is not None else []
    show(found, full=full)
    for path in written:
        typer.echo(f"wrote {path}")
