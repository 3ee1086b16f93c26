"""The examples run on the data they are about, and find what they say they find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sosie.factory import find_file

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_published_classifiers() -> None:
    try:
        find_file("cifar10-test-predictions.npz", "SOSIE_DATA")
    except FileNotFoundError:
        pytest.skip("cifar10-test-predictions.npz is not in SOSIE_DATA")
    path = EXAMPLES / "published_classifiers.py"
    found = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True).stdout
    for said in (
        "error overlap 0.163 to 0.735, mean 0.406; chance 0 (sd 0.009)",
        "both wrong about 2.9% of the images, 0.5% if errors were independent",
        "same mistake where both err: mean 0.695",
        "Classifiers and one judge (accuracy 0.953): mean 0.129",
        "0.188   0.147 to 0.234      0.921         0.627   one judge and another judge",
    ):
        assert said in found
