"""Entry by entry: how far the numbers of B are from those of A.

Neurons belong in pairs, and scale, shift and rotation all count: that is what errors of a conversion look like.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..stats import Entries
from .define import define

# Facts that these measures share, unless a measure declares otherwise.
entry_by_entry = functools.partial(
    define,
    reads=Entries,
    bounds=(0, None),
    closer="down",
    invariant=(),
    same_width=True,
    cost="n p",
    paper="higham2002",
    differentiable=False,
)


@entry_by_entry(symmetric=False, chance="√2 for rows of one size without a common direction")
def relative_error(e: Entries) -> Tensor:
    """‖a − b‖ / ‖a‖ over all entries: 0 for equal rows, 1 for a B of zeros. A is the reference."""
    return (e.dd.sum() / e.aa.sum()).sqrt()


@entry_by_entry(bounds=(None, None), closer="up", symmetric=False, same=None, chance="−3 dB")
def signal_to_noise(e: Entries) -> Tensor:
    """20 log₁₀ ‖a‖ / ‖a − b‖ in decibels (SQNR of a quantised B): 6 more for each bit; infinite for equal rows."""
    return 10 * (e.aa.sum() / e.dd.sum()).log10()


@entry_by_entry(chance="grows with the size of the rows")
def largest_difference(e: Entries) -> Tensor:
    """The largest |a − b|, in the unit of the rows."""
    return e.largest


@entry_by_entry(bounds=(-1, 1), closer="up", invariant={"scale"}, chance="0 for rows without a common direction")
def row_cosine(e: Entries) -> Tensor:
    """The cosine of a row of A and its row of B, the mean over rows; neither is centred."""
    return e.cosines / e.inputs


@entry_by_entry(bounds=(-1, 1), closer="up", invariant={"scale"}, chance="below 0, and the lower the more rows")
def least_row_cosine(e: Entries) -> Tensor:
    """The least cosine of a row of A and its row of B; neither is centred."""
    return e.least_cosine


@entry_by_entry(bounds=(0, 1), symmetric=False, chance="nearly 1")
def mismatched_share(e: Entries) -> Tensor:
    """Share of the entries with |a − b| > atol + rtol |b|, as torch.testing.assert_close counts them for their type."""
    return e.mismatched / e.entries


@entry_by_entry(chance="grows with the size of the rows")
def difference_quantile(e: Entries, share: float = 0.99) -> Tensor:
    """The |a − b| that this share of the entries does not exceed, to 9 %: from a histogram that merges.

    Of more than 262,144 entries that are added at a time, it counts every 29th.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share of difference_quantile is above 0 and at most 1, got {share!r}")
    return e.quantile(share).to(torch.float64)
