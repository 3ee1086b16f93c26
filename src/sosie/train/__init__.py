"""Training, as far as comparing models needs it."""

from .attached import Attached
from .decorrelation import Decorrelation, decorrelation
from .loop import Augment, accuracy, fit
from .penalties import Penalty
from .recorder import Recorder
from .run_folder import Run, open_run
from .together import Checkpoint, fit_together
from .tokens import TokenPenalty, calibrate_tokens

__all__ = [
    "Attached",
    "Augment",
    "Checkpoint",
    "Decorrelation",
    "Penalty",
    "Recorder",
    "Run",
    "TokenPenalty",
    "accuracy",
    "calibrate_tokens",
    "decorrelation",
    "fit",
    "fit_together",
    "open_run",
]
