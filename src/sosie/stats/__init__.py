"""Mergeable statistics of paired rows, and the views that measures read from them."""

from .answers import KINDS, Answers, Kind, Reader, check_labels
from .atoms import AtomTable
from .from_rows import RowScatter
from .gram_parts import BLOCK, GramMaker, GramSide
from .grams import Grams
from .joint_sums import JointMaker, JointSums, SiteSums
from .lottery import ROWS, Lottery, row_hash
from .maps import linear_maps
from .moments import MomentMaker, Moments, MomentSide
from .outputs import OutputSums
from .row_grams import GROUPS, SMALLEST_GROUP
from .sample import NO_NEURONS, Sample, SampleMaker, SampleSide
from .shuffle import Shuffle
from .sketches import (
    KERNELS,
    Buckets,
    Drawn,
    Kernel,
    NotShared,
    Pairs,
    Resketch,
    SiteForm,
    SiteMaker,
    SiteSketch,
    Sketch,
    SketchPair,
    Spans,
    Takes,
    check_seed,
    mean_squared,
    parts_of,
    plan_forms,
)
from .storage import is_statistics, load_statistics, moved, on_device, save_statistics
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
from .weight_views import Atoms, LinearMaps, TensorPair, UncentredLinearMaps, Weights

Statistic = Moments | Grams | Sample

__all__ = [
    "BLOCK",
    "GROUPS",
    "KERNELS",
    "KINDS",
    "NO_NEURONS",
    "ROWS",
    "SMALLEST_GROUP",
    "Alignment",
    "Answers",
    "AtomTable",
    "Atoms",
    "Buckets",
    "Continuous",
    "Covariances",
    "DebiasedAlignment",
    "Differences",
    "Distributions",
    "Drawn",
    "GramMaker",
    "GramSide",
    "Grams",
    "JointMaker",
    "JointSums",
    "Kernel",
    "Kind",
    "LinearMaps",
    "Lottery",
    "MarkedPredictions",
    "MomentMaker",
    "MomentSide",
    "Moments",
    "Neurons",
    "NotShared",
    "OutputSums",
    "Outputs",
    "PairedRows",
    "Pairs",
    "Predictions",
    "Reader",
    "Resketch",
    "RowScatter",
    "Sample",
    "SampleMaker",
    "SampleSide",
    "Scatter",
    "Shuffle",
    "SiteForm",
    "SiteMaker",
    "SiteRows",
    "SiteSketch",
    "SiteSums",
    "Sketch",
    "SketchPair",
    "Spans",
    "Statistic",
    "Takes",
    "TensorPair",
    "UncentredAlignment",
    "UncentredLinearMaps",
    "View",
    "Weights",
    "check_labels",
    "check_seed",
    "is_statistics",
    "linear_maps",
    "load_statistics",
    "mean_squared",
    "moved",
    "on_device",
    "parts_of",
    "plan_forms",
    "row_hash",
    "save_statistics",
]
