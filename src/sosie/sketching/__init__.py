"""Sketches of features and gradients: made in one pass, compared like models, and classified from."""

from .classifiers import Classifiers, classify
from .comparing import DEFAULT, KERNEL, UNPAIRED, check_sketches, compare_sketches, compare_unpaired, is_sketch
from .fisher import FisherRao, Task2Vec, fisher_rao_norm, task2vec
from .scores import transfer
from .sketches import Sketch, sketch

__all__ = [
    "DEFAULT",
    "KERNEL",
    "UNPAIRED",
    "Classifiers",
    "FisherRao",
    "Sketch",
    "Task2Vec",
    "check_sketches",
    "classify",
    "compare_sketches",
    "compare_unpaired",
    "fisher_rao_norm",
    "is_sketch",
    "sketch",
    "task2vec",
    "transfer",
]
