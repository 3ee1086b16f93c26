"""Tasks learnt one after another, with filter atoms of each task on coefficients that all share."""

from .ensembles import Ensemble, ensemble
from .learning import METHODS, Task, learn_tasks
from .result import Continual

__all__ = ["METHODS", "Continual", "Ensemble", "Task", "ensemble", "learn_tasks"]
