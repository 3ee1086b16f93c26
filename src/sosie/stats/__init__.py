"""Mergeable statistics of paired rows, and the views that measures read from them."""

from .atoms import AtomTable
from .from_rows import RowScatter
from .grams import BLOCK, GramMaker, Grams, GramSide
from .hashes import Buckets, Drawn, Resketch, check_seed
from .moments import MomentMaker, Moments, MomentSide
from .outputs import KINDS, Answers, Kind, OutputSums, Reader, check_labels
from .row_grams import GROUPS, SMALLEST_GROUP
from .sample import NO_NEURONS, ROWS, RowSampler, Sample, SampleMaker, SampleSide, row_hash
from .shuffle import Shuffle
from .storage import is_statistics, load_statistics, moved, on_device, save_statistics, storable
from .views import (
    Alignment,
    Atoms,
    Continuous,
    Covariances,
    DebiasedAlignment,
    Differences,
    Distributions,
    LinearMaps,
    MarkedPredictions,
    Neurons,
    Outputs,
    PairedRows,
    PairViews,
    Predictions,
    Scatter,
    SiteRows,
    TensorPair,
    UncentredAlignment,
    UncentredLinearMaps,
    View,
    Weights,
    linear_maps,
)

Statistic = Moments | Grams | Sample
