"""Results are data: nothing in them needs a model, or torch, to be read again."""

from .answers import Answer, Neighbours
from .chance import LEVEL, by_chance, correction, decisive_p, stars, written_p
from .collection import Comparisons, MadeWhenAsked
from .comparison import ARRAYS, Array, Caveat, Closer, Comparison, Side, Values
from .cost import Cost, Costs
from .dynamics import THRESHOLDS, Dynamics, Order
from .files import (
    DamagedFile,
    OtherFile,
    check_writable,
    read_json,
    read_tensors,
    write_atomically,
    write_json,
    write_tensors,
    write_weights,
)
from .layers import TENSORS, WHOLE, at_layers, layers
from .leaderboard import Entry, Leaderboard
from .nested_files import read_nested, write_nested
from .shifted import is_shifted
from .stitched import in_order, what_is_said, what_it_does
from .storage import load, side_from_json
from .summary import Summary, same_depth, summarise, two_decimals
from .tables import counted
from .transfer import (
    MEAN_EMBEDDING,
    TRANSFER,
    is_transfer,
    least_first,
    over_sites,
    sites_least_first,
    transfer_sentence_of_all,
)
from .zoo_answers import Clusters, Duplicates, Family, Map, Recommendation

__all__ = [
    "ARRAYS",
    "LEVEL",
    "MEAN_EMBEDDING",
    "TENSORS",
    "THRESHOLDS",
    "TRANSFER",
    "WHOLE",
    "Answer",
    "Array",
    "Caveat",
    "Closer",
    "Clusters",
    "Comparison",
    "Comparisons",
    "Cost",
    "Costs",
    "DamagedFile",
    "Duplicates",
    "Dynamics",
    "Entry",
    "Family",
    "Leaderboard",
    "MadeWhenAsked",
    "Map",
    "Neighbours",
    "Order",
    "OtherFile",
    "Recommendation",
    "Side",
    "Summary",
    "Values",
    "at_layers",
    "by_chance",
    "check_writable",
    "correction",
    "counted",
    "decisive_p",
    "in_order",
    "is_shifted",
    "is_transfer",
    "layers",
    "least_first",
    "load",
    "over_sites",
    "read_json",
    "read_nested",
    "read_tensors",
    "same_depth",
    "side_from_json",
    "sites_least_first",
    "stars",
    "summarise",
    "transfer_sentence_of_all",
    "two_decimals",
    "what_is_said",
    "what_it_does",
    "write_atomically",
    "write_json",
    "write_nested",
    "write_tensors",
    "write_weights",
    "written_p",
]
