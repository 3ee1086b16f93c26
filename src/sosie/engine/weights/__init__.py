"""Comparing what models are made of: no data."""

from .comparing import compare_weights
from .given import of_weights
from .layers import task_vector, tensor_sites
from .matching import Matched, match_weights
from .tensors import tensor_values

__all__ = ["Matched", "compare_weights", "match_weights", "of_weights", "task_vector", "tensor_sites", "tensor_values"]
