"""Draws a paper's figures from its results: what every papers/<name>/draw.py shares. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Figure = Callable[[dict[str, Any]], Any]  # what results/<name>.json holds → a figure


def set_style(settings: Mapping[str, Any]) -> None:
    """A paper's own settings of matplotlib beside those of all; files come out the same each time."""
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sosie", **settings})


def draw_all(paper: Path, figures: Mapping[str, Figure], *, tight: bool = False) -> None:
    """Every figure whose results are there, beside them; the first word of the command line is another folder."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else paper / "results"
    for name, draw in figures.items():
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        figure = draw(json.loads(path.read_text("utf-8")))
        if tight:
            figure.tight_layout()
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)
        print(path.with_suffix(".svg"))
