"""Sketches of features and gradients: made in one pass, compared like models, and classified from."""

from ..engine.network import is_sketch
from .classifiers import Classifiers, classify
from .comparing import UNPAIRED, compare_sketches, compare_unpaired, named
from .fisher import FisherRao, Task2Vec, fisher_rao_norm, task2vec
from .scores import transfer
from .sketches import Sketch, sketch

__all__ = [
    "UNPAIRED",
    "Classifiers",
    "FisherRao",
    "Sketch",
    "Task2Vec",
    "classify",
    "compare_sketches",
    "compare_unpaired",
    "fisher_rao_norm",
    "is_sketch",
    "named",
    "sketch",
    "task2vec",
    "transfer",
]
