"""Comparing what models are made of: no data."""

from .comparing import compare_weights
from .given import of_weights
from .joint_atoms import JointAtoms, decompose_together
from .layers import task_vector, tensor_sites
from .matching import Matched, match_weights
from .tensors import tensor_values

__all__ = [
    "JointAtoms",
    "Matched",
    "compare_weights",
    "decompose_together",
    "match_weights",
    "of_weights",
    "task_vector",
    "tensor_sites",
    "tensor_values",
]
