"""How a network changes over time: recorded runs or checkpoints, every time against every other."""

from .comparing import dynamics
from .monitor import Monitor
from .recorder import Recorder, hf_callback, lightning_callback
from .run_folder import Run, open_run

__all__ = ["Monitor", "Recorder", "Run", "dynamics", "hf_callback", "lightning_callback", "open_run"]
