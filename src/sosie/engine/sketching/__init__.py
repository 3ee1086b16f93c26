"""Sketches of features and gradients: made in one pass, compared like models."""

from .comparing import compare_unpaired
from .door import sketch
from .transfer import transfer

__all__ = ["compare_unpaired", "sketch", "transfer"]
