"""Which sites are layers: comparisons of weights have one beside them that stands for the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .comparison import ARRAYS, Array, Comparison, Values

TENSORS = "tensors"  # the rule of comparisons of weights, tensor by tensor
WHOLE = "all"  # their site that is no layer: every parameter as one vector, or the mean over layers of atoms


def layers(sites: Sequence[str], rule: str = TENSORS) -> list[int]:
    """The numbers of the sites that are layers; of a whole model alone, that."""
    found = [k for k, site in enumerate(sites) if rule != TENSORS or site != WHOLE]
    return found or list(range(len(sites)))


def layers_of(comparison: Comparison) -> tuple[list[int], list[int]]:
    """Of both sides."""
    a, b = (layers(side.sites, comparison.rows_rule) for side in (comparison.side_a, comparison.side_b))
    return a, b


def at_layers(comparison: Comparison, measure: str) -> Values:
    """What a measure says of layers alone."""
    values, at = comparison[measure], np.ix_(*layers_of(comparison))
    arrays: dict[str, Array | None] = {name: getattr(values, name) for name in ARRAYS}
    return replace(values, **{name: None if array is None else array[at] for name, array in arrays.items()})  # type: ignore[arg-type]
