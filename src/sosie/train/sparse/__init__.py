"""Sparse training: masks that hold, how they are made, grown and counted."""

from .making import pruned_masks, random_masks
from .masks import Masks

__all__ = ["Masks", "pruned_masks", "random_masks"]
