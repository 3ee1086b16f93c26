"""From models and data to results, in one pass."""

from .comparing import DEFAULT, compare, open_source
from .look import look_at
from .one_shot import list_measures, measure
from .outputs import compare_outputs
from .sketching import KERNEL, UNPAIRED, compare_unpaired, is_sketch, sketch, transfer
from .stitching import Stitch, Stitched, TaskLoss, stitch, stitch_sites

__all__ = [
    "DEFAULT",
    "KERNEL",
    "UNPAIRED",
    "Stitch",
    "Stitched",
    "TaskLoss",
    "compare",
    "compare_outputs",
    "compare_unpaired",
    "is_sketch",
    "list_measures",
    "look_at",
    "measure",
    "open_source",
    "sketch",
    "stitch",
    "stitch_sites",
    "transfer",
]
