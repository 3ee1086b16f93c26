"""How a network changes over time: recorded runs or checkpoints, every time against every other."""

from .comparing import dynamics

__all__ = ["dynamics"]
