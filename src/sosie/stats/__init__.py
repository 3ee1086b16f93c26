"""Mergeable statistics of paired rows, and the views that measures read from them."""

from .gram_parts import BLOCK, GramMaker, GramSide
from .grams import Grams
from .moments import MomentMaker, Moments, MomentSide
from .row_grams import GROUPS, SMALLEST_GROUP
from .sample import NO_NEURONS, ROWS, Lottery, Sample, SampleMaker, SampleSide
from .shuffle import Shuffle
from .storage import is_statistics, load_statistics, moved, save_statistics
from .views import (
    Alignment,
    Covariances,
    DebiasedAlignment,
    Neurons,
    PairedRows,
    Scatter,
    SiteRows,
    UncentredAlignment,
    View,
)

Statistic = Moments | Grams | Sample

__all__ = [
    "BLOCK",
    "GROUPS",
    "NO_NEURONS",
    "ROWS",
    "SMALLEST_GROUP",
    "Alignment",
    "Covariances",
    "DebiasedAlignment",
    "GramMaker",
    "GramSide",
    "Grams",
    "Lottery",
    "MomentMaker",
    "MomentSide",
    "Moments",
    "Neurons",
    "PairedRows",
    "Sample",
    "SampleMaker",
    "SampleSide",
    "Scatter",
    "Shuffle",
    "SiteRows",
    "Statistic",
    "UncentredAlignment",
    "View",
    "is_statistics",
    "load_statistics",
    "moved",
    "save_statistics",
]
