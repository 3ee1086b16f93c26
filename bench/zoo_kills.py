"""A process that adds models to a zoo is killed at random moments; what was complete must be there, bit by bit.

Each round a child opens the zoo and adds fingerprints as fast as it can, telling each that is done; in every fifth
round it also adds one more, removes it, and compacts the zoo, again and again. It is killed (SIGKILL) after a random
time of up to a third of a second. Then the zoo is opened anew: every model that was told is there, every model that is
there has the bytes it was given, and `check` finds nothing but what the next writer overwrites. The next child goes on
with the same zoo.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosie.zoo import Fingerprint, Probe, Zoo
from sosie.zoo.fingerprints import project

WHAT = """A process that adds models is killed at random moments, and another goes on. *lost*: models that were added
and are not there; *wrong bytes*: vectors that are not those given; *tails* and *leftovers*: kills that hit an add or a
compaction half-way; *unannounced*: models that were complete when the process was killed before it could say so."""
KILLS, LONGEST = 200, 1 / 3  # rounds; seconds until a kill
N, SITES, SIZE, DIFFERENT = 64, 8, 128, 16
PROBE = torch.arange(N * 4, dtype=torch.float32).reshape(N, 4)


def made(seed: int) -> Fingerprint:
    """Numbers in the form of a fingerprint, 64 KiB of them."""
    probe = Probe.of(PROBE)
    exact = np.random.default_rng(seed).normal(size=(SITES, N * (N - 1) // 2))
    exact = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)
    vectors = {"cka": project(torch.from_numpy(exact), SIZE, 0).numpy()}
    about = {"architecture": "Net", "parameters": seed, "model": f"{seed:016x}"}
    labels = {"cka": tuple(f"layer{k}" for k in range(SITES))}
    return Fingerprint(probe.digest, N, SIZE, 0, "flatten", vectors, labels, exact, {}, about)


def add_until_killed(folder: Path, prints: list[Fingerprint], first: int, compacts: bool, pipe: int) -> None:
    zoo = Zoo(folder)
    for k in range(first, first + 10_000):
        zoo.add(prints[k % len(prints)], f"m{k}")
        os.write(pipe, f"{k}\n".encode())
        if compacts:
            zoo.add(prints[k % len(prints)], f"scrap{k}")
            zoo.remove(f"scrap{k}")
            zoo.compact()


def one_round(folder: Path, prints: list[Fingerprint], first: int, compacts: bool, delay: float) -> set[int]:
    """Which models the child said were added before it was killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            add_until_killed(folder, prints, first, compacts, writes)
        finally:
            os._exit(3)  # not reached: it is killed before
    os.close(writes)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reads) as lines:
        told = {int(line) for line in lines.read().split("\n")[:-1]}
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"the child ended by itself, with status {status}")
    return told


def kill_many(folder: Path, kills: int, *, longest: float = LONGEST, seed: int = 0) -> dict[str, Any]:
    """Kill so many; what was found, problems first."""
    moments = random.Random(seed)
    prints = [made(k) for k in range(DIFFERENT)]
    Zoo(folder, PROBE, size=SIZE, kinds=("cka",))
    complete: set[int] = set()
    # Tails and leftovers are rounds whose kill hit an add or a compaction half-way.
    found: Counter[str] = Counter(lost=0, wrong_bytes=0, problems=0, tails=0, leftovers=0, unannounced=0)
    before: dict[str, set[str]] = {"tail": set(), "leftover": set()}
    for turn in range(kills):
        first, compacts = max(complete, default=-1) + 1, turn % 5 == 4
        told = one_round(folder, prints, first, compacts, moments.uniform(0, longest))
        zoo = Zoo(folder)
        report = zoo.check()
        found["problems"] += sum(not problem["harmless"] for problem in report.problems)
        for what in ("tail", "leftover"):
            now = {problem["text"] for problem in report.problems if problem["what"] == what}
            found[f"{what}s"] += bool(now - before[what])
            before[what] = now
        there = {int(name[1:]) for name in zoo if name.startswith("m")}
        found["lost"] += len((complete | told) - there)
        found["unannounced"] += len(there - complete - told)  # done, but killed before it was told
        for k in there - complete:
            kept = zoo[f"m{k}"].fingerprint
            found["wrong_bytes"] += not np.array_equal(kept.exact, prints[k % DIFFERENT].exact)
            found["wrong_bytes"] += not np.array_equal(kept.vectors["cka"], prints[k % DIFFERENT].vectors["cka"])
        complete |= there
    zoo = Zoo(folder)
    zoo.check(repair=True)
    found["after_repair"] = len(zoo.check().problems)
    return {"kills": kills, "models": len(complete), **found}


def main() -> None:
    from measuring import show, write

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        found = kill_many(Path(folder) / "zoo", KILLS)
        found["seconds"] = round(time.perf_counter() - started, 1)
    show("kills at random moments", [found])
    write("zoo-kills", {"what": WHAT, "rows": [found]})


if __name__ == "__main__":
    main()
