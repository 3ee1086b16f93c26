"""Sketches of features and gradients: made in one pass, compared like models."""

from .comparing import compare_unpaired
from .door import sketch

__all__ = ["compare_unpaired", "sketch"]
