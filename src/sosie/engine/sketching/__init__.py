"""Sketches of features and gradients: made in one pass, compared like models."""

from .comparing import KERNEL, UNPAIRED, compare_unpaired, is_sketch
from .door import sketch
from .transfer import transfer

__all__ = ["KERNEL", "UNPAIRED", "compare_unpaired", "is_sketch", "sketch", "transfer"]
