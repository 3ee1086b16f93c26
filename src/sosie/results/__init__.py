"""Results are data: nothing in them needs a model, or torch, to be read again."""

from .answers import Answer, Clusters, Duplicates, Family, Map, Neighbours, Recommendation
from .benchmark import Cost, Costs, Entry, Leaderboard
from .comparison import (
    ARRAYS,
    LEVEL,
    SIDE,
    TENSORS,
    WHOLE,
    Caveat,
    Chance,
    Closer,
    Comparison,
    Comparisons,
    Estimate,
    Interval,
    LazyComparisons,
    Number,
    Side,
    at_layers,
    by_chance,
    correction,
    decisive_p,
    doubts,
    layers,
    rules_in_words,
    rules_of,
    same_depth,
    stars,
    written_p,
)
from .diff import QUANTILES, Diff, OutputDiff, Place, SiteDiff, TensorDiff
from .dynamics import THRESHOLDS, Dynamics, Order
from .storage import Array, Result, load
from .summary import (
    MEAN_EMBEDDING,
    TRANSFER,
    Summary,
    headline,
    in_order,
    indices,
    least_first,
    over_sites,
    sites_least_first,
    summarise,
    transfer_sentence_of_all,
    two_decimals,
)
from .tables import cell, counted, number
