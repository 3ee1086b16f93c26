"""Stitching: cut two networks, fit or train the joint between them, evaluate the network that this makes."""

from .cut_models import CutModel, Stitched
from .fitting import Stitch, stitch
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
