"""Comparing what models are made of: no data."""

from .atoms import JointAtoms, decompose_together
from .comparing import compare_weights
from .matching import Matching, match_weights
from .tensors import task_vector, tensor_sites, tensor_values

__all__ = [
    "JointAtoms",
    "Matching",
    "compare_weights",
    "decompose_together",
    "match_weights",
    "task_vector",
    "tensor_sites",
    "tensor_values",
]
