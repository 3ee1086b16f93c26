"""Comparing what models are made of: no data."""

from .comparing import compare_weights
from .given import of_weights

__all__ = ["compare_weights", "of_weights"]
