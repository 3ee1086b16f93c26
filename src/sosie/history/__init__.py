"""How a network changes over time: recorded runs or checkpoints, every time against every other."""

from .comparing import dynamics
from .recorder import Recorder, hf_callback, lightning_callback
from .run_folder import Run, open_run

__all__ = [
    "Recorder",
    "Run",
    "dynamics",
    "hf_callback",
    "lightning_callback",
    "open_run",
]
