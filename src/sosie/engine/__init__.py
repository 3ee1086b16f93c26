"""From models and data to results, in one pass."""

from .comparing import DEFAULT, compare, open_source
from .look import look_at
from .one_shot import list_measures, measure
from .outputs import compare_outputs
from .sketching import Classifiers, classify, compare_unpaired, linear_probe, sketch
from .stitching import Stitch, Stitched, TaskLoss, stitch, stitch_sites

__all__ = [
    "DEFAULT",
    "Classifiers",
    "Stitch",
    "Stitched",
    "TaskLoss",
    "classify",
    "compare",
    "compare_outputs",
    "compare_unpaired",
    "linear_probe",
    "list_measures",
    "look_at",
    "measure",
    "open_source",
    "sketch",
    "stitch",
    "stitch_sites",
]
