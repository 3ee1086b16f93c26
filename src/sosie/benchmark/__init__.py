"""Is a measure any good? Calibration, grounding in what models do, and resistance to manipulation."""

from .cost import FORMULAS, Count, cost, counted
from .leaderboard import run_benchmark
from .population import SCALES, Scale
from .probe import linear_probe

__all__ = ["FORMULAS", "SCALES", "Count", "Scale", "cost", "counted", "linear_probe", "run_benchmark"]
