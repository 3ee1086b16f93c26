"""Pages, terminal tables and figures of results. Reads results only, never a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..results import Answer, Comparison, Comparisons, Costs, Diff, Dynamics, Leaderboard
from . import answers, benchmark, comparison, diff, dynamics
from .answers import print_answer
from .benchmark import print_costs, print_leaderboard
from .comparison import print_comparison
from .diff import print_diff, write_junit, write_junit_error
from .dynamics import print_dynamics
from .plots import plot_curves, plot_heatmap, write_plots
from .terminal import print_measures, print_numbers, print_sites, print_table

# How a result is printed, and its page
_KINDS: dict[type, tuple[Callable[..., None], Callable[[Any], str] | None]] = {
    Comparison: (print_comparison, comparison.render),
    Comparisons: (print_comparison, comparison.render),
    Diff: (print_diff, diff.render),
    Dynamics: (print_dynamics, dynamics.render),
    Leaderboard: (print_leaderboard, benchmark.render),
    Costs: (print_costs, None),
    Answer: (print_answer, answers.render),
}


def print_result(result: Any, *, full: bool = False) -> None:
    """Print a result of any kind; `full`: every row of a long table, for kinds whose tables are cut."""
    show = next(show for kind, (show, _) in _KINDS.items() if isinstance(result, kind))
    show(result, **({"full": full} if isinstance(result, Comparison | Comparisons | Diff | Dynamics) else {}))


def write_report(
    result: Comparison | Comparisons | Diff | Dynamics | Leaderboard | Answer, path: str | os.PathLike[str]
) -> Path:
    """Write one self-contained HTML file for a comparison, all pairs of models, a diff, dynamics, or a zoo's answer."""
    render = next((render for kind, (_, render) in _KINDS.items() if isinstance(result, kind)), None)
    if render is None:
        known = ", ".join(kind.__name__ for kind, (_, render) in _KINDS.items() if render)
        raise TypeError(f"write_report shows a result ({known}), not a {type(result).__name__}")
    return write_atomically(path, render(result))
