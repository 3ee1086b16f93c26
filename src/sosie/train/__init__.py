"""Training, as far as comparing models needs it."""

from .loop import accuracy, fit

__all__ = ["accuracy", "fit"]
