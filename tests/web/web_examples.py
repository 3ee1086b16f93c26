"""A small zoo of made fingerprints whose relations are known, and a made run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosie.results import Dynamics, Estimate
from sosie.zoo import Fingerprint, Probe, Zoo
from sosie.zoo.fingerprints import project

N, SIZE, SITES = 16, 32, 4
INPUTS = torch.arange(N * 3, dtype=torch.float32).reshape(N, 3)
PROBE = Probe.of(INPUTS)
HOSTILE = '<img src=x onerror="alert(1)">'
HOSTILE_SITE = "</script><script>alert(2)</script>\u202e"


def made(
    seed: int, sites: int = SITES, *, near: Fingerprint | None = None, off: float = 0.1, **about: Any
) -> Fingerprint:
    """Random vectors, or those of another model with some noise on them."""
    random = np.random.default_rng(seed)
    exact = random.normal(size=(sites, N * (N - 1) // 2))
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    if near is not None and near.exact is not None:
        exact = near.exact + off * exact
    exact = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)
    vectors = {"cka": project(torch.from_numpy(exact), SIZE, 0).numpy()}
    labels: dict[str, tuple[str, ...]] = {"cka": tuple(f"layer{k}" for k in range(sites))}
    if seed % 2 == 0:
        some = random.normal(size=(2, SIZE))
        vectors["weights"] = (some / np.linalg.norm(some, axis=1, keepdims=True)).astype(np.float32)
        labels["weights"] = ("layer0", "layer1")
    facts = {"architecture": "Net", "parameters": 1000 + seed, "model": f"{seed:016x}", "sosie": "0", **about}
    return Fingerprint(PROBE.digest, N, SIZE, 0, "flatten", vectors, labels, exact, {"atoms": "no atoms"}, facts)


def new_zoo(folder: Path) -> Zoo:
    """base; base-1, base-2, base-3 ever farther from it; m4 … m10 of their own; one whose names are hostile."""
    zoo = Zoo(folder / "zoo", INPUTS, size=SIZE)
    base = made(0)
    zoo.add(base, "base", tags=["trained"], task="digits")
    for k in (1, 2, 3):
        zoo.add(made(k, near=base, off=0.3 * k), f"base-{k}", tags=["trained", "tuned"], task="digits", parent="base")
    for k in range(4, 11):
        zoo.add(made(k, architecture=f"Wide{k % 2}"), f"m{k}", tags=["trained"])
    odd = made(11, architecture="<b>Odd</b>")
    labels = {"cka": (HOSTILE_SITE, *odd.labels["cka"][1:])}
    odd = Fingerprint(**{**vars(odd), "labels": labels})
    zoo.add(odd, HOSTILE, tags=["<i>tag"], task="<u>task</u>")
    return zoo


def a_run() -> Dynamics:
    """Three layers over five steps: the first settles at once, the last at the end."""
    at = np.array([0.0, 0.5, 0.8, 0.95, 1.0])
    value = np.stack([1 - speed * np.abs(at[:, None] - at[None]) for speed in (0.0, 0.1, 1.0)])
    steps = (0, 10, 20, 40, 80)
    values = {
        "debiased_cka": Estimate(value, 100, "Grams", "up", (None, 1.0), 1.0),
        "procrustes_angle": Estimate(1 - value, 100, "Moments", "down", (0.0, 2.0), 0.0),
    }
    return Dynamics("a run", "a run", "activations", ("first", "second", "third"), steps, steps, values)


ODD_VALUES: dict[str, list[float]] = {
    "all 1": [1.0],
    "1 but for rounding": [1.0, 1 - 2**-53, 1 - 2**-24],
    "no value": [np.nan],
    "tiny": [1e-300, 4e-300],
    "huge": [1e300, -3e300],
    "negative": [-0.7, -0.2999999999],
}


def an_odd_run(sites: int, steps: int) -> Dynamics:
    """A similarity and a distance of each kind of values that a scale has trouble with."""
    values = {}
    for name, numbers in ODD_VALUES.items():
        value = np.resize(np.array(numbers), (sites, steps, steps))
        values[name] = Estimate(value, 100, "Grams", "up", (None, 1.0), 1.0)
        values[f"{name}, down"] = Estimate(value, 100, "Moments", "down", (0.0, None), 0.0)
    named, times = tuple(f"layer{k}" * (1 + 20 * k) for k in range(sites)), tuple(range(steps))
    return Dynamics("odd", "odd", "activations", named, times, times, values)


def awaited(start: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run in a thread: a browser that is open has a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(start())).result()
