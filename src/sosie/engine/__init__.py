"""From models and data to results, in one pass."""

from .comparing import compare
from .costing import cost
from .dynamics import dynamics
from .fisher_rao import FisherRao, fisher_rao_norm
from .look import look_at
from .one_shot import list_measures, measure
from .opening import open_source
from .outputs import compare_outputs
from .sketching import (
    KERNEL,
    UNPAIRED,
    Classifiers,
    classify,
    compare_unpaired,
    is_sketch,
    linear_probe,
    sketch,
    transfer,
)
from .stitching import Stitch, Stitched, TaskLoss, stitch, stitch_sites
from .task2vec import Task2Vec, task2vec
from .weights import compare_weights

__all__ = [
    "KERNEL",
    "UNPAIRED",
    "Classifiers",
    "FisherRao",
    "Stitch",
    "Stitched",
    "Task2Vec",
    "TaskLoss",
    "classify",
    "compare",
    "compare_outputs",
    "compare_unpaired",
    "compare_weights",
    "cost",
    "dynamics",
    "fisher_rao_norm",
    "is_sketch",
    "linear_probe",
    "list_measures",
    "look_at",
    "measure",
    "open_source",
    "sketch",
    "stitch",
    "stitch_sites",
    "task2vec",
    "transfer",
]
