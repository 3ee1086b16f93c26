"""Stitching: halves → fit or training of the joint → evaluation; single joints, maps of all sites, files."""

from .fitting import Stitch, stitch
from .halves import CutModel, Stitched
from .sites import stitch_sites
from .task_loss import TaskLoss

__all__ = [
    "CutModel",
    "Stitch",
    "Stitched",
    "TaskLoss",
    "stitch",
    "stitch_sites",
]
