"""Training, as far as comparing models needs it."""

from .loop import Augment, accuracy, fit
from .recorder import Recorder
from .run_folder import Run, open_run
from .together import Checkpoint, fit_together

__all__ = ["Augment", "Checkpoint", "Recorder", "Run", "accuracy", "fit", "fit_together", "open_run"]
