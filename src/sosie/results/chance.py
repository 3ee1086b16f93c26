"""Which values chance could have given too, and how a p-value is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .comparison import Array, Values

LEVEL = 0.05  # a value that chance gives more often than this is not distinguishable from chance

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def decisive_p(values: Values) -> Array | None:
    """The p-value that decides: corrected for the search where that is known, else the plain one, NaN where neither."""
    if values.p_search is None:
        return values.p
    return values.p_search if values.p is None else np.where(np.isnan(values.p_search), values.p, values.p_search)


def by_chance(values: Values) -> Mask | None:
    """True where a defined value is not distinguishable from chance; None where no p-values are known."""
    p = decisive_p(values)
    return None if p is None else (p > LEVEL) & np.isfinite(values.value)


def distinguishable(values: Values) -> Mask | None:
    """True where a defined value is distinguishable from chance. Where p is unknown, neither this nor the other."""
    p = decisive_p(values)
    return None if p is None else (p <= LEVEL) & np.isfinite(values.value)


def share_distinguishable(values: Values) -> float | None:
    """Of the pairs whose p is known, the share that is distinguishable from chance."""
    yes, no = distinguishable(values), by_chance(values)
    if yes is None or no is None or not (yes | no).any():
        return None
    return float(yes.sum() / (yes | no).sum())


def correction(values: Values) -> str:
    """How the deciding p-value was come by, in words."""
    if values.p_search is None:
        return "not corrected for the search"
    return "corrected for the search"


def written_p(p: float) -> str:
    """Three decimals; four where three would hide on which side of the level it lies."""
    if not np.isfinite(p):
        return "unknown"
    if p < 0.001:
        return "<0.001"
    return f"{p:.4f}" if f"{p:.3f}" == f"{LEVEL:.3f}" else f"{p:.3f}"


def stars(p: float) -> str:
    if not np.isfinite(p):
        return ""
    return "n.s." if p > LEVEL else "*" * (1 + (p <= 0.01) + (p <= 0.001))
