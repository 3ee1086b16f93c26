"""Sketches of features and gradients: made in one pass, compared like models, and classified from."""

from .classify import Classifiers, classify
from .comparing import KERNEL, UNPAIRED, compare_unpaired, is_sketch
from .door import sketch
from .probe import linear_probe
from .transfer import transfer

__all__ = [
    "KERNEL",
    "UNPAIRED",
    "Classifiers",
    "classify",
    "compare_unpaired",
    "is_sketch",
    "linear_probe",
    "sketch",
    "transfer",
]
