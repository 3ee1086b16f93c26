"""Training, as far as comparing models needs it."""

from .loop import Augment, accuracy, fit
from .together import Checkpoint, fit_together

__all__ = ["Augment", "Checkpoint", "accuracy", "fit", "fit_together"]
