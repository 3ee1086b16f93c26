"""Results of comparing answers under shifts: the sites are the shifts, the same on both sides."""

from __future__ import annotations

from .comparison import Comparison


def is_shifted(comparison: Comparison) -> bool:
    return comparison.rows_rule == "outputs" and len(comparison.side_a.sites) > 1
