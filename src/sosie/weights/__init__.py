"""Comparing what models are made of: no data."""

from .atoms import JointAtoms, decompose_together
from .comparing import compare_weights
from .matching import Matched, match_weights
from .tensors import task_vector, tensor_sites, tensor_values

__all__ = [
    "JointAtoms",
    "Matched",
    "compare_weights",
    "decompose_together",
    "match_weights",
    "task_vector",
    "tensor_sites",
    "tensor_values",
]
