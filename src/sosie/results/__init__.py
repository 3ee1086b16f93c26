"""Results are data: nothing in them needs a model, or torch, to be read again."""

from .collection import Comparisons
from .comparison import Caveat, Closer, Comparison, Side, Values
from .files import check_writable, write_atomically
from .storage import DamagedFile, load, side_from_json
from .summary import Summary, same_depth, summarise

__all__ = [
    "Caveat",
    "Closer",
    "Comparison",
    "Comparisons",
    "DamagedFile",
    "Side",
    "Summary",
    "Values",
    "check_writable",
    "load",
    "same_depth",
    "side_from_json",
    "summarise",
    "write_atomically",
]
