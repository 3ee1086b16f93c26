"""The nearest models and layers, by products with all vectors or through an index."""

from .plain import nearest_rows, score_models
from .query import Query, as_query
from .search import search
from .views import Views

__all__ = ["Query", "Views", "as_query", "nearest_rows", "score_models", "search"]
