"""Mergeable statistics of paired rows, and the views that measures read from them."""

from .answers import KINDS, Answers, Kind, Reader, check_labels
from .gram_parts import BLOCK, GramMaker, GramSide
from .grams import Grams
from .joint_sums import JointMaker, JointSums, SiteSums
from .lottery import ROWS, Lottery, row_hash
from .moments import MomentMaker, Moments, MomentSide
from .outputs import OutputSums
from .row_grams import GROUPS, SMALLEST_GROUP
from .sample import NO_NEURONS, Sample, SampleMaker, SampleSide
from .shuffle import Shuffle
from .storage import is_statistics, load_statistics, moved, save_statistics
from .views import (
    Alignment,
    Continuous,
    Covariances,
    DebiasedAlignment,
    Differences,
    Distributions,
    MarkedPredictions,
    Neurons,
    Outputs,
    PairedRows,
    Predictions,
    Scatter,
    SiteRows,
    UncentredAlignment,
    View,
)

Statistic = Moments | Grams | Sample

__all__ = [
    "BLOCK",
    "GROUPS",
    "KINDS",
    "NO_NEURONS",
    "ROWS",
    "SMALLEST_GROUP",
    "Alignment",
    "Answers",
    "Continuous",
    "Covariances",
    "DebiasedAlignment",
    "Differences",
    "Distributions",
    "GramMaker",
    "GramSide",
    "Grams",
    "JointMaker",
    "JointSums",
    "Kind",
    "Lottery",
    "MarkedPredictions",
    "MomentMaker",
    "MomentSide",
    "Moments",
    "Neurons",
    "OutputSums",
    "Outputs",
    "PairedRows",
    "Predictions",
    "Reader",
    "Sample",
    "SampleMaker",
    "SampleSide",
    "Scatter",
    "Shuffle",
    "SiteRows",
    "SiteSums",
    "Statistic",
    "UncentredAlignment",
    "View",
    "check_labels",
    "is_statistics",
    "load_statistics",
    "moved",
    "row_hash",
    "save_statistics",
]
