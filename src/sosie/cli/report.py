"""`sosie report`: show a saved comparison again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    file: Annotated[Path, typer.Argument(help="What --out of a verb, or save of a result, wrote.")],
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write heat map and curves as .svg or .png, one file a measure, by this name."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every layer.")] = False,
) -> None:
    """Print a saved comparison as tables, and write its page or plots."""
    from ..report import print_answer, print_comparison, print_costs, print_dynamics, write_plots, write_report
    from ..results import Answer, Costs, Dynamics, load

    found = load(file)
    if isinstance(found, Costs):
        if html is not None or plot is not None:
            raise ValueError("costs are a table on the terminal: --html and --plot are for comparisons")
        print_costs(found)
        return
    written = [write_report(found, html)] if html is not None else []
    if isinstance(found, Answer):
        if plot is not None:
            raise ValueError("--plot draws comparisons; of what a zoo answered write the page with --html")
        print_answer(found)
    elif isinstance(found, Dynamics):
        if plot is not None:
            raise ValueError("--plot draws comparisons; for dynamics write the page with --html")
        print_dynamics(found, full=full)
    else:
        written += write_plots(found, plot) if plot is not None else []
        print_comparison(found, full=full)
    for path in written:
        typer.echo(f"wrote {path}")
