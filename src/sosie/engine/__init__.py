"""From models and data to results, in one pass."""

from .comparing import compare, open_source
from .look import look_at
from .one_shot import list_measures, measure

__all__ = ["compare", "list_measures", "look_at", "measure", "open_source"]
