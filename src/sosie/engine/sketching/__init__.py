"""Sketches of features and gradients: made in one pass, compared like models, and classified from."""

from .classify import Classifiers, classify
from .comparing import compare_unpaired
from .door import sketch
from .probe import linear_probe

__all__ = ["Classifiers", "classify", "compare_unpaired", "linear_probe", "sketch"]
