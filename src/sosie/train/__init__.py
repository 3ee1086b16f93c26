"""Training, as far as comparing models needs it."""

from .attached import Attached
from .augment import Augment
from .decorrelation import Decorrelation, decorrelation
from .loop import accuracy, fit
from .penalties import Penalty
from .recorder import Recorder
from .run_folder import Run, open_run
from .sparse import Masks, Regrow, pruned_masks, random_masks
from .together import Checkpoint, fit_together
from .tokens import TokenPenalty, calibrate_tokens
from .training import Training

__all__ = [
    "Attached",
    "Augment",
    "Checkpoint",
    "Decorrelation",
    "Masks",
    "Penalty",
    "Recorder",
    "Regrow",
    "Run",
    "TokenPenalty",
    "Training",
    "accuracy",
    "calibrate_tokens",
    "decorrelation",
    "fit",
    "fit_together",
    "open_run",
    "pruned_masks",
    "random_masks",
]
