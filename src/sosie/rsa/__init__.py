"""Representational similarity analysis: dissimilarity matrices, models of them, and what the data say of the models."""

from .inference import Evaluation, Model, evaluate, noise_ceiling
from .rdms import RDMs, compare_rdms

__all__ = ["Evaluation", "Model", "RDMs", "compare_rdms", "evaluate", "noise_ceiling"]
