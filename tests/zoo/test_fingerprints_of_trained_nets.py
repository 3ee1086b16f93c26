"""Networks that others trained: relatives are near, and neighbours by short vectors are those by exact values."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sosie.data import open_images
from sosie.factory import find_file
from sosie.zoo import Probe, fingerprint

TINY = [f"drfrankenstein-tiny10-cifar10-seed{k:02d}.safetensors" for k in range(4)]


def test_layers_of_tiny10_find_their_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path(__file__).resolve().parents[3] / "shared"
    for name, folder in (("SOSIE_DATA", "data"), ("SOSIE_WEIGHTS", "weights")):
        monkeypatch.setenv(name, os.pathsep.join([str(shared / folder), os.environ.get(name, "")]))
    try:
        find_file(TINY[0], "SOSIE_WEIGHTS")
        probe = Probe.of(open_images("cifar10", split="test", max_rows=128).batches(128))
    except FileNotFoundError as error:
        pytest.skip(f"Tiny-10 or CIFAR-10 is not at hand: {error}")
    prints = [fingerprint(f"tiny10@{file}", probe, kinds="cka") for file in TINY]
    exact = np.block([[a.cosine(b, exact=True) for b in prints] for a in prints])
    short = np.block([[a.cosine(b) for b in prints] for a in prints])
    found = []
    for k in range(len(exact)):
        others = np.delete(np.arange(len(exact)), k)
        nearest = set(others[np.argsort(-exact[k, others])[:10]])
        few = others[np.argsort(-short[k, others])[:50]]
        found.append(len(nearest & set(few[np.argsort(-exact[k, few])[:10]])) / 10)
    assert np.mean(found) >= 0.95
    depth = len(prints[0].sites)
    same = exact[:depth, depth : 2 * depth]
    # The layer of another seed that is nearest is the same one, or next to it.
    assert (np.abs(same.argmax(1) - np.arange(depth)) <= 3).all()
