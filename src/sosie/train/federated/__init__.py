"""Federated learning in one process: clients, methods, a simulation, and ensembles of similar clients."""

from .clients import Clients, Parts, split_classes, split_tasks
from .simulation import METHODS, Federated, Method, Phase, ensemble_accuracy, open_method, simulate

__all__ = [
    "METHODS",
    "Clients",
    "Federated",
    "Method",
    "Parts",
    "Phase",
    "ensemble_accuracy",
    "open_method",
    "simulate",
    "split_classes",
    "split_tasks",
]
