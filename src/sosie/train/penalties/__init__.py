"""Similarity as a training signal."""

from .penalty import Penalty

__all__ = ["Penalty"]
