"""Mergeable statistics of paired rows, and the views that measures read from them."""

from .gram_parts import BLOCK, GramMaker, GramPart
from .grams import Grams
from .moments import MomentMaker, MomentPart, Moments
from .sample import ROWS, Lottery, Sample, SampleMaker, SamplePart
from .storage import is_statistics, load_statistics, save_statistics
from .views import (
    Alignment,
    Covariances,
    DebiasedAlignment,
    PairedRows,
    Scatter,
    SiteRows,
    UncentredAlignment,
    View,
)

Statistic = Moments | Grams | Sample

__all__ = [
    "BLOCK",
    "ROWS",
    "Alignment",
    "Covariances",
    "DebiasedAlignment",
    "GramMaker",
    "GramPart",
    "Grams",
    "Lottery",
    "MomentMaker",
    "MomentPart",
    "Moments",
    "PairedRows",
    "Sample",
    "SampleMaker",
    "SamplePart",
    "Scatter",
    "SiteRows",
    "Statistic",
    "UncentredAlignment",
    "View",
    "is_statistics",
    "load_statistics",
    "save_statistics",
]
