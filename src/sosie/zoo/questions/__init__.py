"""Questions about all models of a zoo, and about one among them."""

from .clusters import clusters
from .duplicates import duplicates
from .family import family
from .map import lay_out
from .similarities import similarities

__all__ = ["clusters", "duplicates", "family", "lay_out", "similarities"]
