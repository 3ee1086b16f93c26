"""Questions about all models of a zoo, and about one among them."""

from .clusters import find_clusters
from .duplicates import find_duplicates
from .family import find_family
from .map import lay_out
from .similarities import similarities

__all__ = ["find_clusters", "find_duplicates", "find_family", "lay_out", "similarities"]
