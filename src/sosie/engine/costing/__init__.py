"""What a measure costs: operations, time and memory."""

from .counting import FORMULAS, Count, counted
from .door import cost

__all__ = ["FORMULAS", "Count", "cost", "counted"]
