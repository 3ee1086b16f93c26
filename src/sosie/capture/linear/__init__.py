"""A network with its nonlinearities removed: what is linear in its input, site by site."""

from .part import LinearPart, NotLinear
from .run import Linearised, check_linear, linearised, weighted_layers

__all__ = ["LinearPart", "Linearised", "NotLinear", "check_linear", "linearised", "weighted_layers"]
