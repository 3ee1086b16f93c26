"""Comparing what models are made of; no data."""

from .layers import task_vector, tensor_sites
from .matching import Matched, match_weights
from .tensors import tensor_values

__all__ = ["Matched", "match_weights", "task_vector", "tensor_sites", "tensor_values"]
