"""Training, as far as comparing models needs it."""

from .loop import Augment, accuracy, fit

__all__ = ["Augment", "accuracy", "fit"]
