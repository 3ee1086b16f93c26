"""Training, as far as comparing models needs it."""

from .attached import Attached
from .decorrelation import Decorrelation, decorrelation
from .loop import Augment, accuracy, fit
from .together import Checkpoint, fit_together

__all__ = [
    "Attached",
    "Augment",
    "Checkpoint",
    "Decorrelation",
    "accuracy",
    "decorrelation",
    "fit",
    "fit_together",
]
