"""sosie: how alike are these neural networks - in what they represent, what they do, and what they are made of?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .diffing import assert_same, diff
    from .engine import Running, align, compare, compare_outputs, extract, list_measures, measure
    from .history import dynamics
    from .report import write_report
    from .results import load
    from .sketching import compare_unpaired, sketch, transfer
    from .stitching import Stitch, stitch, stitch_sites
    from .weights import compare_weights
    from .zoo import Zoo

# Names are fetched when first used, so that `import sosie` and `sosie --help` do not wait for torch.
_HOMES = {
    "diffing": ("assert_same", "diff"),
    "engine": ("Running", "align", "compare", "compare_outputs", "extract", "list_measures", "measure"),
    "history": ("dynamics",),
    "report": ("write_report",),
    "results": ("load",),
    "sketching": ("compare_unpaired", "sketch", "transfer"),
    "stitching": ("Stitch", "stitch", "stitch_sites"),
    "weights": ("compare_weights",),
    "zoo": ("Zoo",),
}
_FOLDERS = {*_HOMES, "benchmark", "capture", "data", "linalg", "measures", "models", "rsa", "shapes", "stats", "train"}

__all__ = [
    "Running",
    "Stitch",
    "Zoo",
    "align",
    "assert_same",
    "compare",
    "compare_outputs",
    "compare_unpaired",
    "compare_weights",
    "diff",
    "dynamics",
    "extract",
    "list_measures",
    "load",
    "measure",
    "sketch",
    "stitch",
    "stitch_sites",
    "transfer",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f".{name}", __name__)
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'sosie' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_FOLDERS, "__version__"])
