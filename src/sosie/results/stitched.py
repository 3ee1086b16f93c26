"""Results of stitching: which values say what the stitched networks do, and which what an index says of the layers."""

from __future__ import annotations

import numpy as np

from .comparison import Comparison

STITCHED = ("relative_accuracy", "accuracy", "agreement_b", "agreement_a", "cross_entropy")


def what_it_does(comparison: Comparison) -> str | None:
    """The value that says best how the stitched networks do; None where nothing was stitched."""
    if not {"agreement_b", "cross_entropy"} <= set(comparison.values):
        return None
    return next(name for name in STITCHED if name in comparison.values and name != "accuracy")


def what_is_said(comparison: Comparison) -> list[str]:
    """The indices beside it."""
    return [name for name in comparison.values if name not in STITCHED]


def in_order(comparison: Comparison) -> bool:
    """Whether several sites were paired one to one, the first with the first, and nothing else was looked at."""
    count_a, count_b = len(comparison.side_a.sites), len(comparison.side_b.sites)
    if count_a != count_b or count_a < 2:
        return False
    beside = ~np.eye(count_a, dtype=bool)
    return all(bool(np.isnan(values.value[beside]).all()) for values in comparison.values.values())
