"""`sosie report`: show a saved comparison again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from . import options as opt


def report(
    file: Annotated[Path, opt.argument(opt.INPUTS, "FILE", "A file that --out or `save` wrote.")],
    html: opt.Html = None,
    plot: Annotated[
        Path | None,
        opt.file(
            "Write a heat map and curves as .svg, .png or .pdf, one file for each measure, with this name.",
            (".svg", ".png", ".pdf"),
        ),
    ] = None,
    full: opt.Full = False,
) -> None:
    """What did a saved comparison find?

    $ sosie report demo.json
    $ sosie report demo.json --html again.html --plot demo.svg
    """
    from ..results import Comparison, Comparisons, Costs, load

    result: Any = load(file)
    if isinstance(result, Costs) and html is not None:
        raise ValueError("costs have no page, only a table on the terminal: leave out --html")
    if plot is not None and not isinstance(result, (Comparison, Comparisons)):
        raise ValueError(f"--plot draws comparisons; {file} holds {type(result).__name__}")
    opt.tell(result, html=html, plot=plot, full=full)
