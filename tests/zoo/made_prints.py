"""Fingerprints made of numbers, as those of models are: fast, and known again by their seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosie.zoo import Fingerprint, Probe, Zoo
from sosie.zoo.fingerprints import project

N, SIZE = 8, 16
INPUTS = torch.arange(N * 3, dtype=torch.float32).reshape(N, 3)
PROBE = Probe.of(INPUTS)


def made(seed: int, sites: int = 3, probe: Probe = PROBE, size: int = SIZE) -> Fingerprint:
    random = np.random.default_rng(seed)
    exact = random.normal(size=(sites, probe.n * (probe.n - 1) // 2))
    exact = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)
    vectors = {"cka": project(torch.from_numpy(exact), size, 0).numpy()}
    labels = {"cka": tuple(f"layer{k}" for k in range(sites))}
    if seed % 2:
        some = random.normal(size=(2, size))
        vectors["weights"] = (some / np.linalg.norm(some, axis=1, keepdims=True)).astype(np.float32)
        labels["weights"] = ("layer0", "layer1")
    absent = {} if seed % 2 else {"weights": "no linear form"}
    about = {"architecture": f"Net{seed % 3}", "parameters": 10 * seed, "model": f"{seed:016x}", "sosie": "0"}
    return Fingerprint(probe.digest, probe.n, size, 0, "flatten", vectors, labels, exact, absent, about)


def new_zoo(folder: Path, count: int = 0, **options: Any) -> Zoo:
    """With the models m0, m1 … in it."""
    zoo = Zoo(folder / "zoo", INPUTS, size=SIZE, **options)
    if count:
        zoo.add({f"m{k}": made(k) for k in range(count)})
    return zoo


def same(a: Fingerprint, b: Fingerprint) -> bool:
    """Bit by bit."""
    assert a.exact is not None
    assert b.exact is not None
    facts = ("labels", "absent", "about", "probe", "n", "size", "seed", "rows")
    return (
        all(getattr(a, name) == getattr(b, name) for name in facts)
        and a.exact.tobytes() == b.exact.tobytes()
        and all(a.vectors[key].tobytes() == b.vectors[key].tobytes() for key in a.vectors)
    )
