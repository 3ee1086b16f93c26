"""Which axes of which weights share a permutation, read from one forward."""

from .algebra import Axis, leaves, order_of, places_of
from .trace import WeightAxes, named_weights, weight_axes

__all__ = ["Axis", "WeightAxes", "leaves", "named_weights", "order_of", "places_of", "weight_axes"]
