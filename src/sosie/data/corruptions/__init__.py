"""The fifteen corruptions of MNIST-C (Mu and Gilmer 2019), for images of any size and number of channels."""

# In this order they are listed.
from . import noise, blur, geometry, weather, drawn, edges  # noqa: I001, F401
from .define import CORRUPTIONS, Corruption, corrupt, find_corruption

__all__ = ["CORRUPTIONS", "Corruption", "corrupt", "find_corruption"]
