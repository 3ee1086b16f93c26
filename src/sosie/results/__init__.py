"""Results are data: nothing in them needs a model, or torch, to be read again."""

from .answers import Answer, Clusters, Duplicates, Family, Map, Neighbours, Recommendation
from .benchmark import Cost, Costs, Entry, Leaderboard
from .collection import Comparisons, LazyComparisons
from .comparison import (
    ARRAYS,
    LEVEL,
    Array,
    Caveat,
    Closer,
    Comparison,
    Estimate,
    Side,
    by_chance,
    correction,
    decisive_p,
    doubts,
    stars,
    written_p,
)
from .dynamics import THRESHOLDS, Dynamics, Order
from .storage import SIDE, load, side_from_json
from .summary import (
    MEAN_EMBEDDING,
    TENSORS,
    TRANSFER,
    WHOLE,
    Summary,
    at_layers,
    headline,
    in_order,
    indices,
    layers,
    least_first,
    over_sites,
    same_depth,
    sites_least_first,
    summarise,
    transfer_sentence_of_all,
    two_decimals,
)
from .tables import cell, counted, number
