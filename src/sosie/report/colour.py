"""One colour scale for page and plots: perceptually uniform, and "alike" always has the same hue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..results import Closer, Estimate

STEPS = 33  # stops handed to page and plots; linear in between
ROUNDING = 1e-6  # of the scale: what float32 does to a value
_NEARLY_ZERO = -0.05  # an unbiased estimate of nothing scatters around 0; that does not count as negative

# Lightness, chroma and hue (OKLCH) from unlike to alike: ink blue, teal, green, gold. Lightness only rises,
# so the order survives a grey print and colour blindness.
_STOPS = np.array(
    [
        [0.27, 0.085, 290.0],
        [0.43, 0.095, 258.0],
        [0.59, 0.095, 208.0],
        [0.75, 0.125, 158.0],
        [0.905, 0.155, 100.0],
    ]
)


@dataclass(frozen=True)
class Scale:
    """The ends of the colours: `far` is the value of the unlike end, `alike` that of the other."""

    far: float
    alike: float
    clipped: bool = False  # some values lie beyond `far` and share its colour


def full_scale(values: Estimate) -> Scale:
    """The scale a measure's bounds give, whatever the data, so that two pages can be laid side by side."""
    finite = _finite(values.value)
    low, high = values.bounds
    if values.closer == "up":
        alike = _first(high, max([*_known(values.same), *finite], default=1.0))
        far = _far_below(low, alike, min(finite, default=0.0))
    else:
        alike = _first(low, min([*_known(values.same), *finite], default=0.0))
        far = _first(high, _round_up(max(finite, default=alike + 1.0)))
    if abs(far - alike) <= ROUNDING * abs(alike):
        far = alike - (abs(alike) or 1.0) if values.closer == "up" else alike + (abs(alike) or 1.0)
    # A value that rounding alone puts past the end of the scale does not count as clipped.
    beyond = any((v - alike) / (far - alike) > 1 + 1e-9 for v in finite)
    return Scale(far, alike, beyond)


def data_scale(values: Estimate) -> Scale:
    """The scale from the least to the most alike value found; the full one where all are equal but for rounding."""
    finite, full = _finite(values.value), full_scale(values)
    if not finite or max(finite) - min(finite) <= ROUNDING * max(abs(full.alike - full.far), *map(abs, finite)):
        return full
    return _directed(min(finite), max(finite), values.closer)


@cache
def ramp() -> tuple[str, ...]:
    """Colours from unlike to alike as #rrggbb, at equal distances from each other in OKLab."""
    path = _path(np.linspace(0, 1, 2001))
    travelled = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(path, axis=0), axis=1))])
    even = np.linspace(0, travelled[-1], STEPS)
    lab = np.stack([np.interp(even, travelled, path[:, k]) for k in range(3)], axis=1)
    return tuple("#" + "".join(f"{round(255 * c):02x}" for c in rgb) for rgb in _to_srgb(lab))


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _finite(array: np.ndarray) -> list[float]:
    return [float(v) for v in array[np.isfinite(array)]]


def _first(bound: float | None, otherwise: float) -> float:
    return otherwise if bound is None else bound


def _far_below(low: float | None, alike: float, least: float) -> float:
    """Zero is where similarity ends; only a real negative value opens the rest of a scale that has one."""
    if low is not None and (low >= 0 or least < _NEARLY_ZERO):
        return low
    return 0.0 if alike > 0 else least


def _directed(low: float, high: float, closer: Closer) -> Scale:
    return Scale(low, high) if closer == "up" else Scale(high, low)


def _round_up(value: float) -> float:
    """The next half of a power of ten's multiple, so that an open scale ends on a readable number."""
    if value <= 0:
        return value
    unit = 10.0 ** math.floor(math.log10(value)) / 2
    return math.ceil(value / unit - 1e-9) * unit


def _path(t: np.ndarray) -> np.ndarray:
    """The stops joined by straight lines in OKLCH, as OKLab."""
    at = np.linspace(0, 1, len(_STOPS))
    light, chroma, hue = (np.interp(t, at, _STOPS[:, k]) for k in range(3))
    turn = np.deg2rad(hue)
    return np.stack([light, chroma * np.cos(turn), chroma * np.sin(turn)], axis=1)


def _to_srgb(lab: np.ndarray) -> np.ndarray:
    """OKLab to sRGB in [0, 1] (Ottosson 2020)."""
    to_lms = np.array(
        [
            [1.0, 0.3963377774, 0.2158037573],
            [1.0, -0.1055613458, -0.0638541728],
            [1.0, -0.0894841775, -1.2914855480],
        ]
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = (lab @ to_lms.T) ** 3 @ to_rgb.T
    linear = np.clip(linear, 0, 1)  # colours a screen cannot show move to the nearest it can
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
