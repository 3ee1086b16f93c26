"""Sketches of features and gradients: made in one pass, compared like models, and classified from."""

from .classify import Classifiers, classify
from .comparing import DEFAULT, KERNEL, UNPAIRED, check_sketches, compare_sketches, compare_unpaired, is_sketch
from .door import sketch
from .probe import linear_probe
from .transfer import transfer

__all__ = [
    "DEFAULT",
    "KERNEL",
    "UNPAIRED",
    "Classifiers",
    "check_sketches",
    "classify",
    "compare_sketches",
    "compare_unpaired",
    "is_sketch",
    "linear_probe",
    "sketch",
    "transfer",
]
