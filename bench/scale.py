"""What the note in docs/scale.md rests on: parts of a comparison dealt to many processes, and a zoo being written.

    python bench/scale.py            # a minute or two, on one core

Processes are simulated here: the parts are real, made and merged by the code that runs under torchrun, in one process.
That real ones give the same values is tested in tests/engine/test_distributed.py.
"""

from __future__ import annotations

import itertools
import math
import pickle
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosie.measures import debiased_cka
from sosie.stats import DebiasedAlignment, Grams, Moments
from sosie.zoo import Fingerprint, Probe, Zoo
from sosie.zoo.fingerprints import project

WHAT = "parts of one comparison merged as from many processes; rows against precision; models written to a zoo"
CHUNK, CHUNKS, SITES, WIDTH = 256, 256, 16, 64
PROCESSES = (1, 2, 8, 64, 256)
MERGES = 20_000
REPEATS = 200
PROBES, SIZE, MODELS, DIFFERENT = 256, 512, 200, 8


def activations(n: int, seed: int, sites: int = SITES, width: int = WIDTH) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of two models that share a third of their variance, in more directions than a block has rows."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(n, width, generator=generator)
    x, y = ([shared + 1.4 * torch.randn(n, width, generator=generator) for _ in range(sites)] for _ in "xy")
    return x, y


def dealt(parts: list[Any], processes: int) -> tuple[list[Any], Any, float]:
    """Each process merges every so-many-th part, then the first merges theirs: seconds of that last step."""
    theirs = [reduce(lambda a, b: a.merge(b), parts[rank::processes]) for rank in range(processes)]
    started = time.perf_counter()
    total = reduce(lambda a, b: a.merge(b), theirs)
    return theirs, total, time.perf_counter() - started


def of_processes(kind: str, parts: list[Any]) -> list[dict[str, Any]]:
    rows, first = [], None
    for processes in PROCESSES:
        if processes > len(parts):
            continue
        theirs, total, seconds = dealt(parts, processes)
        value = debiased_cka(total.alignment(DebiasedAlignment))
        first = value if first is None else first
        rows.append(
            {
                "statistic": kind,
                "processes": processes,
                "off by": float((value - first).abs().max()),
                "bytes a process sends": len(pickle.dumps(theirs[-1])),
                "seconds to merge one": seconds / (processes - 1) if processes > 1 else None,
            }
        )
    return rows


def long_sums(parts: list[Grams]) -> dict[str, Any]:
    """Rounding of one sum after many merges, against the exactly rounded sum of the same numbers."""
    total, added = parts[0], [parts[0]]
    for part in itertools.islice(itertools.cycle(parts), 1, MERGES):
        total = total.merge(part)
        added.append(part)
    wanted = np.array([math.fsum(p.debiased.xy[0, i, i].item() for p in added) for i in range(SITES)])
    found = np.array([total.debiased.xy[0, i, i].item() for i in range(SITES)])
    return {"merges": MERGES, "relative error": float(np.abs(found / wanted - 1).max())}


def precision_by_rows() -> list[dict[str, Any]]:
    """The standard deviation of a value over independent data, by the number of rows."""
    found = []
    for n in (1024, 4096):
        values = [
            float(debiased_cka(Grams.of(x, y, uncentred=False).alignment(DebiasedAlignment)))
            for x, y in (activations(n, 1000 + seed, sites=1) for seed in range(REPEATS))
        ]
        spread = statistics.stdev(values)
        found.append(
            {"rows": n, "value": statistics.mean(values), "sd": spread, "sd times root of rows": spread * n**0.5}
        )
    return found


def prints() -> list[Fingerprint]:
    probe = Probe.of(torch.arange(PROBES * 3, dtype=torch.float32).reshape(PROBES, 3))
    labels = {"cka": tuple(f"layer{k}" for k in range(SITES))}
    found = []
    for seed in range(DIFFERENT):
        exact = np.random.default_rng(seed).normal(size=(SITES, PROBES * (PROBES - 1) // 2))
        exact = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)
        vectors = {"cka": project(torch.from_numpy(exact), SIZE, 0).numpy()}
        about = {"architecture": "Net", "parameters": 1, "model": f"{seed:016x}", "sosie": "0"}
        found.append(Fingerprint(probe.digest, PROBES, SIZE, 0, "flatten", vectors, labels, exact, {}, about))
    return found


def writing(folder: Path) -> dict[str, Any]:
    """One process writes models whose fingerprints come from elsewhere, each in a transaction of its own."""
    made = prints()
    data = torch.arange(PROBES * 3, dtype=torch.float32).reshape(PROBES, 3)
    zoo = Zoo(folder, data, size=SIZE, kinds="cka")
    started = time.perf_counter()
    for k in range(MODELS):
        zoo.add(made[k % DIFFERENT], name=f"m{k}")
    seconds = time.perf_counter() - started
    with closing(sqlite3.connect(folder / "zoo.sqlite")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # else what is written is still in its log
    on_disk = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    started = time.perf_counter()
    assert len(Zoo(folder)) == MODELS
    opening = time.perf_counter() - started
    return {
        "models": MODELS,
        "sites": SITES,
        "models a second": MODELS / seconds,
        "bytes a model, short": on_disk[f"cka-{SIZE}.f32"] / MODELS,
        "bytes a model, whole": on_disk["exact.f32"] / MODELS,
        "bytes a model, database": on_disk["zoo.sqlite"] / MODELS,
        "seconds to open": opening,
    }


def main() -> None:
    from measuring import show, write

    torch.set_num_threads(1)
    blocks = [Grams.of(*activations(CHUNK, k), uncentred=False) for k in range(CHUNKS)]
    rows = of_processes(f"Grams, {SITES} x {SITES} sites", blocks)
    sums = [Moments.of(*activations(CHUNK, k, sites=2, width=256)) for k in range(64)]
    rows += of_processes("Moments, 2 x 2 sites of 256", sums)
    show("parts of one comparison", rows)
    long = long_sums(blocks)
    show("rounding", [long])
    precise = precision_by_rows()
    show("rows and precision", precise)
    with tempfile.TemporaryDirectory() as folder:
        zoo = writing(Path(folder) / "zoo")
    show("one writer of a zoo", [zoo])
    write("scale", {"what": WHAT, "processes": rows, "rounding": long, "precision": precise, "zoo": zoo})


if __name__ == "__main__":
    main()
