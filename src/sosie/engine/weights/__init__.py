"""Comparing what models are made of; no data."""

from .matching import Matched, match_weights

__all__ = ["Matched", "match_weights"]
