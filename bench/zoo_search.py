"""Searching a zoo of a million site vectors of 256 numbers: by products with all of them, and through an index.

62,500 models of 16 sites each, in 400 families: a site's vector is its family's, with noise that leaves two models of a
family at a cosine of about .74. Each stage is a process of its own, so that its memory is its own. A search is
the whole call, names and sites of the neighbours included; queries are not in the zoo. `python bench/zoo_search.py
--models 2000` tries it and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosie.zoo import Fingerprint, Probe, Zoo
from sosie.zoo.store import Record

WHAT = """A million site vectors of 256 numbers, of 62,500 models in families. *opening*: `Zoo(folder)`; *first*: the
first search, which reads where the vectors are (and the index); *layer*: the 10 nearest of all site vectors to one;
*model*: the 10 nearest models to one of 16 sites; medians over queries. *recall*: of the 10 nearest, how many are
found. *memory*: the most that the process had, file pages that it has mapped included."""
MODELS, SITES, SIZE, FAMILIES, QUERIES = 62_500, 16, 256, 400, 50
GROUP = 2500  # models in one transaction
PROBE = torch.arange(64.0).reshape(16, 4)
STAGES = ("make", "plain", "index", "indexed")


def vectors(random: np.random.Generator, families: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Of some models: (models, sites, size) of length 1."""
    found = families[chosen] + 0.6 / SIZE**0.5 * random.standard_normal((len(chosen), SITES, SIZE), np.float32)
    return found / np.linalg.norm(found, axis=2, keepdims=True)


def families_of() -> np.ndarray:
    found = np.random.default_rng(0).standard_normal((FAMILIES, SITES, SIZE), np.float32)
    return found / np.linalg.norm(found, axis=2, keepdims=True)


def make(folder: Path, models: int) -> dict[str, Any]:
    zoo = Zoo(folder, PROBE, size=SIZE, kinds=("cka",))
    random, families = np.random.default_rng(1), families_of()
    labels = tuple(f"layer{k}" for k in range(SITES))
    start = time.perf_counter()
    for first in range(0, models, GROUP):
        some = vectors(random, families, random.integers(0, FAMILIES, min(GROUP, models - first)))
        zoo.store.append(
            [
                Record(
                    name=f"m{first + k}",
                    digest=f"{first + k:016x}",
                    architecture="Net",
                    parameters=1,
                    blocks={"cka": (one, labels)},
                )
                for k, one in enumerate(some)
            ]
        )
    return {"seconds to write": time.perf_counter() - start}


def queries() -> list[Fingerprint]:
    random, probe = np.random.default_rng(2), Probe.of(PROBE)
    made = vectors(random, families_of(), random.integers(0, FAMILIES, QUERIES))
    labels = {"cka": tuple(f"layer{k}" for k in range(SITES))}
    return [Fingerprint(probe.digest, probe.n, SIZE, 0, "flatten", {"cka": v}, labels, None, {}, {}) for v in made]


def ask(folder: Path, index: bool) -> dict[str, Any]:
    """Opening, first search, searches; what was found is kept beside the zoo for the recall."""
    from measuring import high_water

    asked = queries()
    start = time.perf_counter()
    zoo = Zoo(folder)
    opening = time.perf_counter() - start
    start = time.perf_counter()
    zoo.search(asked[0], index=index)
    found: dict[str, Any] = {"opening": opening, "first": time.perf_counter() - start}
    answers: dict[str, list[list[Any]]] = {}
    for by, site in (("layer", "layer7"), ("model", None)):
        seconds = []
        for query in asked:
            start = time.perf_counter()
            rows = zoo.search(query, by=by, site=site, index=index).rows()
            seconds.append(time.perf_counter() - start)
            answers.setdefault(by, []).append([[row["name"], row["site_b"] if site else ""] for row in rows])
        found[by], found[f"{by} at most"] = statistics.median(seconds), max(seconds)
    kept = folder.with_suffix(".answers.json")
    if index:
        for by, wanted in json.loads(kept.read_text()).items():
            pairs = zip(wanted, answers[by], strict=True)
            found[f"recall {by}"] = statistics.fmean(
                len({tuple(x) for x in a} & {tuple(x) for x in b}) / len(a) for a, b in pairs
            )
    else:
        kept.write_text(json.dumps(answers))
    return found | {"memory GiB": high_water() / 2**20}


def build(folder: Path) -> dict[str, Any]:
    from measuring import high_water

    start = time.perf_counter()
    about = Zoo(folder).index()
    seconds = time.perf_counter() - start
    return {
        "lists": about["lists"],
        "MiB": about["bytes"] / 2**20,
        "seconds": seconds,
        "memory GiB": high_water() / 2**20,
    }


def stage(name: str, folder: Path, models: int) -> dict[str, Any]:
    if name == "make":
        return make(folder, models)
    return build(folder) if name == "index" else ask(folder, name == "indexed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=MODELS)
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.stage:
        print(json.dumps(stage(given.stage, given.folder, given.models)))
        return
    from measuring import show, write

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in STAGES:
            command = [
                sys.executable,
                __file__,
                "--stage",
                name,
                "--folder",
                f"{folder}/zoo",
                "--models",
                str(given.models),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr}")
            rows.append({"stage": name, **json.loads(done.stdout)})
            print(rows[-1], flush=True)
    for name in ("plain", "indexed"):
        show(name, [row for row in rows if row["stage"] == name])
    if given.models == MODELS:
        write("zoo-search", {"what": WHAT, "rows": rows})


if __name__ == "__main__":
    main()
