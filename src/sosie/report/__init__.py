"""Results made visible: a page, a terminal table, a figure. Reads results only, never a model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answers import print_answer
    from .dynamics import print_dynamics
    from .leaderboard import print_leaderboard
    from .lists import print_costs, print_measures, print_numbers, print_sites, print_table
    from .page import write_report
    from .plots import plot_curves, plot_heatmap, write_plots
    from .text import print_comparison

_NAMES = {
    "answers": ["print_answer"],
    "dynamics": ["print_dynamics"],
    "leaderboard": ["print_leaderboard"],
    "lists": ["print_costs", "print_measures", "print_numbers", "print_sites", "print_table"],
    "page": ["write_report"],
    "plots": ["plot_curves", "plot_heatmap", "write_plots"],
    "text": ["print_comparison"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import jinja2, rich or matplotlib only when something that needs them is used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
