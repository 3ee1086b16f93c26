"""Stitching: cut two networks, fit or train the joint between them, evaluate the network that this makes."""

from .cuts import CutModel
from .fitting import Stitch, stitch, stitch_sites
from .joint import StitchedNetwork
from .task_loss import TaskLoss

__all__ = ["CutModel", "Stitch", "StitchedNetwork", "TaskLoss", "stitch", "stitch_sites"]
