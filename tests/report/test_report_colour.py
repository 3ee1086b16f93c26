"""The colour scale: even steps, readable numbers on it, ends that make sense for every kind of measure."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from report_examples import similarity

import sosie.report.colour
from sosie.report.colour import RAMP, data_scale, full_scale


def linear() -> np.ndarray:
    rgb = np.array([[int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)] for colour in RAMP])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def test_steps_look_equal_and_lightness_only_rises():
    lms = linear() @ np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]).T
    to_lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    lab = np.cbrt(lms) @ to_lab.T
    steps = np.linalg.norm(np.diff(lab, axis=0), axis=1)
    assert steps.max() / steps.min() < 1.25
    assert (np.diff(lab[:, 0]) > 0).all()


def test_numbers_can_be_read_on_every_colour():
    script = Path(sosie.report.colour.__file__).parent / "page" / "shared.js"
    threshold = float(re.search(r"level > ([\d.]+) \* LEVELS", script.read_text())[1])
    brightness = linear() @ [0.2126, 0.7152, 0.0722]
    for k, light in enumerate(brightness):
        dark_ink = k / (len(brightness) - 1) > threshold
        contrast = (light + 0.05) / 0.056 if dark_ink else 0.98 / (light + 0.05)
        assert contrast > 4.3


@pytest.mark.parametrize(
    ("facts", "values", "ends", "clipped"),
    [
        ({"bounds": (0, 1)}, [0.2, 0.9], (0, 1), False),
        ({"bounds": (None, 1)}, [-0.02, 0.9], (0, 1), True),
        ({"bounds": (-1, 1)}, [-0.02, 0.9], (0, 1), True),
        ({"bounds": (-1, 1)}, [-0.6, 0.9], (-1, 1), False),
        ({"bounds": (None, 1)}, [-40, 0.9], (0, 1), True),
        ({"bounds": (0, 2), "closer": "down", "same": 0.0}, [0.2, 0.9], (2, 0), False),
        ({"bounds": (0, None), "closer": "down", "same": 0.0}, [0.2, 7.3], (7.5, 0), False),
        ({"bounds": (0, None), "closer": "down", "same": 0.0}, [0.0, 0.0], (1, 0), False),
        ({"bounds": (0, 1)}, [np.nan, np.nan], (0, 1), False),
    ],
)
def test_the_ends_come_from_the_bounds(facts, values, ends, clipped):
    scale = full_scale(similarity(np.array([values], dtype=float), doubt=False, **facts))
    assert (scale.far, scale.alike, scale.clipped) == (*ends, clipped)


def test_stretched_ends_come_from_the_data():
    value = np.array([[0.4, np.nan, 0.6]])
    up, down = similarity(value, False), similarity(value, False, closer="down", bounds=(0, 1), same=0.0)
    assert (data_scale(up).far, data_scale(up).alike) == (0.4, 0.6)
    assert (data_scale(down).far, data_scale(down).alike) == (0.6, 0.4)
    for nearly in ([[1.0, 1 - 2**-53]], [[1.0, 1 - 2**-24]]):
        assert data_scale(similarity(np.array(nearly), doubt=False)).far == 0, "apart by rounding alone"
