"""Results are data: nothing in them needs a model, or torch, to be read again."""

from .chance import LEVEL, by_chance, correction, decisive_p, stars, written_p
from .collection import Comparisons
from .comparison import Caveat, Closer, Comparison, Side, Values
from .files import check_writable, write_atomically
from .stitched import in_order, what_is_said, what_it_does
from .storage import DamagedFile, load, side_from_json
from .summary import Summary, same_depth, summarise

__all__ = [
    "LEVEL",
    "Caveat",
    "Closer",
    "Comparison",
    "Comparisons",
    "DamagedFile",
    "Side",
    "Summary",
    "Values",
    "by_chance",
    "check_writable",
    "correction",
    "decisive_p",
    "in_order",
    "load",
    "same_depth",
    "side_from_json",
    "stars",
    "summarise",
    "what_is_said",
    "what_it_does",
    "write_atomically",
    "written_p",
]
