"""Mergeable statistics of paired rows, and the views of them that measures read."""

from .entries import Entries, coarser, jackknife, real_numbers, squared_error
from .grams import BLOCK, GramMaker, Grams
from .moments import MomentMaker, Moments
from .outputs import (
    IGNORED,
    Answers,
    Continuous,
    Differences,
    Distributions,
    MarkedPredictions,
    Outputs,
    OutputSums,
    Predictions,
    Reader,
    check_labels,
)
from .repetitions import PairedRepetitions, Repetitions
from .row_grams import SMALLEST_GROUP, AllCovariances, AllPairedRows
from .sample import NO_NEURONS, Sample, SampleMaker
from .sampling import ROWS, Buckets, Fold, Resketch, RowSampler, Shuffle, check_seed, dealt_evenly, row_hash
from .splits import SplitMaker, SplitMoments, Splits, check_folds, dealt_folds, grouped_folds, read_labels
from .storage import is_statistics, load_statistics, moved, on_device, save_statistics, tensors_of
from .views import (
    Alignment,
    Covariances,
    DebiasedAlignment,
    HeldCovariances,
    HeldNeurons,
    Neurons,
    PairedRows,
    PairViews,
    RowScatter,
    Scatter,
    SiteRows,
    UncentredAlignment,
)
from .weights import Atoms, AtomTable, LinearMaps, TensorPair, UncentredLinearMaps, Weights, linear_maps

Statistic = Moments | Grams | Sample
Collected = Statistic | SplitMoments  # what a pass collects
AllPairs = AllCovariances | AllPairedRows
View = (
    Alignment | Covariances | PairedRows | AllPairs | Neurons | Splits | Outputs | Weights | Entries | PairedRepetitions
)
