"""Is a measure any good? Calibration, grounding in what models do, and resistance to manipulation."""

from .running import run_benchmark
from .scales import SCALES, Scale

__all__ = ["SCALES", "Scale", "run_benchmark"]
