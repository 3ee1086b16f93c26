"""Every measure on one pair of sites against whoever else has it: n = 2000 rows, p = q = 512, float64."""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring import show, timed, write
from peers import NUMPY, OPTIONS, peers_of, quietly
from threadpoolctl import threadpool_limits

import sosie
from sosie.measures import find

ROWS, WIDTH, CLASSES, INPUTS = 2000, 512, 100, 64
SHORT = 0.02  # seconds below which a call is timed ten times as often
SLOW = 60.0  # seconds above which a peer gets a single repeat
HOPELESS = 5.0  # times the fastest, above which a peer is not timed again
PACKAGES = ("ckatorch", "pytorch-cka", "cca-zoo", "dcor", "rsatoolbox", "qc-procrustes", "POT")
PACKAGES += ("scikit-learn", "scikit-dimension", "ripser", "scipy", "numpy")


def related(rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two sites that half their variance is common to, with a mean and neurons of different size."""
    random = np.random.default_rng(seed)
    common = random.normal(size=(rows, width // 2))

    def site() -> np.ndarray:
        mixed = common @ random.normal(size=(width // 2, width)) / (width / 2) ** 0.5
        sizes = random.uniform(0.5, 2, size=width)
        return (mixed + random.normal(size=(rows, width)) + random.normal(size=width)) * sizes

    return site(), site()


def given_to(facts: dict[str, Any], rows: int, width: int) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """What a measure is called with: rows or outputs, and what else it needs."""
    random = np.random.default_rng(1)
    outputs = facts["reads"] in ("Predictions", "MarkedPredictions", "Distributions", "Differences", "Continuous")
    x, y = related(rows, min(width, CLASSES) if outputs else width)
    needs: dict[str, np.ndarray] = {}
    if "inputs" in facts["needs"]:
        needs["inputs"] = random.normal(size=(rows, INPUTS))
    if "labels" in facts["needs"]:
        needs["labels"] = np.where(random.random(rows) < 0.7, x.argmax(1), random.integers(x.shape[1], size=rows))
    return (x, y), needs


def compare(facts: dict[str, Any], rows: int, width: int, repeats: int) -> dict[str, Any]:
    name = facts["name"]
    (x, y), needs = given_to(facts, rows, width)
    kind = {"kind": "regression"} if facts["reads"] in ("Differences", "Continuous") else {}
    kind = {"kind": "logits"} if facts["reads"] in ("Predictions", "MarkedPredictions", "Distributions") else kind
    ways: dict[str, Callable[[], float]] = {
        "sosie": partial(quietly, lambda: sosie.measure(name, x, y, **needs, **kind))
    }
    ways |= {peer: partial(quietly, function, x, y, *needs.values()) for peer, function in peers_of(name)}
    values, first = {}, {}
    missing = []
    for way, call in list(ways.items()):
        try:
            for _ in range(2):  # the first call compiles and warms up
                start = time.perf_counter()
                values[way] = call()
                first[way] = time.perf_counter() - start
                if first[way] > SLOW:
                    break
        except ImportError as error:
            del ways[way]
            missing.append(f"{way}: {error}")
    fastest = min((s for way, s in first.items() if way != "sosie"), default=None)
    again = {w: c for w, c in ways.items() if w == "sosie" or first[w] < min(SLOW, HOPELESS * (fastest or 1))}
    if max(first[way] for way in again) < SHORT:
        repeats *= 10  # a millisecond is easily doubled by something else
    seconds = {**first, **timed(again, repeats=repeats, warm=False)}
    packages = {way: s for way, s in seconds.items() if way not in ("sosie", NUMPY)}
    best = min(packages, key=packages.__getitem__, default=None)
    by_hand = seconds.get(NUMPY)
    return {
        "measure": name,
        "sosie, s": seconds["sosie"],
        "package": best or "none",
        "over the package": None if best is None else seconds["sosie"] / packages[best],
        "over NumPy by hand": None if by_hand is None else seconds["sosie"] / by_hand,
        "largest difference": max((abs(values[w] - values["sosie"]) for w in values if w != "sosie"), default=None),
        "seconds": seconds,
        "values": values,
        "missing": missing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="measures to run; nothing is written")
    parser.add_argument("--one-thread", action="store_true", help="everybody on one core; a file of its own is written")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.one_thread:
        torch.set_num_threads(1)
        threadpool_limits(1)
    found = []
    for facts in [*sosie.list_measures(), *({**find(name).facts(), "name": name} for name in OPTIONS)]:
        measure = find(facts["name"])
        if measure.reads_weights or measure.reads_repetitions or (asked.only and facts["name"] not in asked.only):
            continue  # weights have benchmarks of their own; repetitions are no rows
        found.append(compare(facts, asked.rows, asked.width, asked.repeats))
        print(
            f"{found[-1]['measure']}: " + ", ".join(f"{w} {s:.3g} s" for w, s in found[-1]["seconds"].items()),
            flush=True,
        )
    table = [{k: v for k, v in row.items() if k not in ("seconds", "values", "missing")} for row in found]
    show(f"One pair of sites, {asked.rows} rows of {asked.width} columns, float64, CPU", table)
    for key in ("over the package", "over NumPy by hand"):
        ratios = {row["measure"]: row[key] for row in found if row[key] is not None}
        slower = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > 1.1)
        print(f"{key}: {len(ratios)} measures, median {statistics.median(ratios.values() or [0]):.2f}")
        print(f"    more than 1.1: {slower or 'none'}")
    if (asked.rows, asked.width) == (ROWS, WIDTH) and not asked.only:
        versions = {name: version for name in PACKAGES if (version := _version(name))}
        name, what = ("measures-one-thread", f"{__doc__} One thread.") if asked.one_thread else ("measures", __doc__)
        write(name, {"what": what, "written out": NUMPY, "versions": versions, "rows": found})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
