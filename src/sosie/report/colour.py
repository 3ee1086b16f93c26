"""The colour scale of page and plots: perceptually uniform, with the same hue for "alike" always."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..results import Estimate

ROUNDING = 1e-6  # of the scale: rounding in float32
_NEARLY_ZERO = -0.05  # unbiased estimates of 0 scatter around it; values above this do not count as negative

# From unlike to alike: ink blue, teal, green, gold, at equal distances from each other in OKLab (Ottosson 2020) along
# the path through lightness, chroma, hue (0.27, 0.085, 290), (0.43, 0.095, 258), (0.59, 0.095, 208), (0.75, 0.125,
# 158) and (0.905, 0.155, 100). Lightness only rises, so the order survives a grey print and colour blindness.
RAMP = [
    "#271c4c", "#292354", "#2b2a5c", "#2c3164", "#2d386c", "#2d3f74", "#2d477b", "#2d4e82", "#2a5687",
    "#255e8c", "#216690", "#1c6e93", "#187696", "#177e98", "#18869a", "#1c8e9b", "#1a969c", "#1b9d9d",
    "#21a59c", "#2bac9b", "#37b399", "#44ba97", "#52c093", "#61c68f", "#71cb89", "#82d082", "#93d47c",
    "#a4d775", "#b5da6e", "#c6dc67", "#d7df61", "#e7e05c", "#f8e259",
]  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """The values at the ends of the colours, unlike (`far`) and `alike`."""

    far: float
    alike: float
    clipped: bool = False  # some values lie beyond `far` and share its colour


def full_scale(values: Estimate) -> Scale:
    """The scale of a measure's bounds, whatever the data, so that two pages can be compared."""
    finite = _finite(values.value)
    known = finite if values.same is None else [values.same, *finite]
    low, high = values.bounds
    if values.closer == "up":
        alike, least = max(known, default=1.0) if high is None else high, min(finite, default=0.0)
        # A scale ends at 0 even if the bound is lower, unless a value is clearly negative.
        if low is not None and (low >= 0 or least < _NEARLY_ZERO):
            far = low
        else:
            far = 0.0 if alike > 0 else least
    else:
        alike = min(known, default=0.0) if low is None else low
        far = _round_up(max(finite, default=alike + 1.0)) if high is None else high
    if abs(far - alike) <= ROUNDING * abs(alike):
        far = alike - (abs(alike) or 1.0) if values.closer == "up" else alike + (abs(alike) or 1.0)
    # A value past the end of the scale by rounding does not count as clipped.
    beyond = any((v - alike) / (far - alike) > 1 + 1e-9 for v in finite)
    return Scale(far, alike, beyond)


def data_scale(values: Estimate) -> Scale:
    """The scale from the least to the most alike value; the full one if all are equal up to rounding."""
    finite, full = _finite(values.value), full_scale(values)
    if not finite or max(finite) - min(finite) <= ROUNDING * max(abs(full.alike - full.far), *map(abs, finite)):
        return full
    low, high = min(finite), max(finite)
    return Scale(low, high) if values.closer == "up" else Scale(high, low)


def _finite(array: np.ndarray) -> list[float]:
    return [float(v) for v in array[np.isfinite(array)]]


def _round_up(value: float) -> float:
    """The next multiple of half a power of ten, so that an open scale ends on a readable number."""
    if value <= 0:
        return value
    unit = 10.0 ** math.floor(math.log10(value)) / 2
    return math.ceil(value / unit - 1e-9) * unit
