"""The benchmark from the first network to the leaderboard; work that is kept in the folder is not repeated."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..checks import one_of
from ..engine.provenance import provenance
from ..measures import MEASURES
from ..process_state import products
from ..progress import Progress
from ..results import Closer, Entry, Leaderboard
from .candidates import Candidate, Of, open_candidates, values_of
from .population import (
    ALL,
    PAIR_KINDS,
    SCALES,
    BenchmarkFolder,
    Scale,
    agreements,
    groups,
    make_population,
    measure_folder,
    open_benchmark_images,
)
from .trials import Bench, CalibrationNetworks, Ground, UndefinedScore, calibrate, difference, ground, manipulate

TRIED = 3  # networks that are manipulated, and that show the direction of a measure


@products()
def run_benchmark(
    measures: Any = None,
    *,
    scale: str | Scale = "smoke",
    folder: str | os.PathLike[str],
    seed: int = 0,
    device: str | torch.device | None = None,
    resume: bool = True,
    of: Of | None = None,
    closer: Closer | None = None,
    rows: int | None = None,
) -> Leaderboard:
    """Test measures by calibration, correlation with the agreement of networks, and manipulation.

    `measures`: names of sosie's, with options ("mutual_knn(k=5)"), `file.py:function`, or callables f(x, y) of two
    NumPy arrays (n, p) and (n, q), rows paired (`f.takes = "torch"`: tensors), or of two networks (`f.of = "models"`,
    or `of=`); None: all of sosie's. `closer`: "up" if larger means more similar, for functions that do not declare it
    (`f.closer`); by default it is found by comparing networks with themselves. `rows`: images at most.

    `scale`: "smoke" (seconds), "small" (minutes on a CPU) or "paper" (a GPU). Work is kept in `folder`: after an
    interruption, or with other measures, it continues from there, and the leaderboard has all measures tested in it.
    `resume=False` repeats everything.
    """
    scale = scale if isinstance(scale, Scale) else SCALES[one_of(scale, "scale", SCALES)]
    candidates = open_candidates(measures, scale, of=of, closer=closer, rows=rows)
    place = torch.device("cpu" if device is None else device)
    images = open_benchmark_images(scale, seed=seed, device=place)
    store = BenchmarkFolder(folder, {"scale": asdict(scale), "data": images.name, "seed": seed}, resume=resume)
    population = make_population(scale, images, store, seed=seed)
    agreement = agreements(scale, images, population, store, seed=seed)
    at = Ground(scale, population, agreement, images.test, seed=seed)
    probes = CalibrationNetworks(scale, images, population, seed=seed)
    bench = Bench([run[-1] for run in population.converged[:TRIED]], images.test, seed=seed)
    with Progress("testing measures", len(candidates), "measures") as bar:
        for candidate in candidates:
            put_to_the_test(candidate, store, at, probes, bench)
            bar.advance(note=candidate.name)
    entries = [Entry(**{**entry, "notes": tuple(entry["notes"])}) for entry in store.of_measures()]
    board = Leaderboard(
        scale=asdict(scale),
        data={
            "name": images.name,
            "train": len(images.train),
            "test": len(images.test),
            "networks": len(population.models),
            "runs": len(set(population.runs)),
            "untrained": len(population.untrained),
            "consecutive_pairs": sum(len(run) - 1 for run in population.converged),
        },
        pairs={kind: len(at.pairs(kind)) for kind in PAIR_KINDS},
        conditions=groups(scale),
        entries=tuple(entries),
        left_out={m.name: "compares the answers of models, by which measures are judged"
                  for m in MEASURES.values() if m.reads_outputs},
        provenance=provenance(seed=seed, device=str(place)),
    )  # fmt: skip
    board = against_the_leader(board, at)
    board.save(store.folder / "leaderboard.json")
    return board


def put_to_the_test(
    candidate: Candidate, store: BenchmarkFolder, at: Ground, probes: CalibrationNetworks, bench: Bench
) -> None:
    """Run all stages, each a unit of work; if one fails, the reason is kept and the others continue."""
    home, made_of = measure_folder(candidate.name), f"{candidate.made_of} {candidate.of} {candidate.rows}"
    failures: dict[str, str] = {}
    undefined: dict[str, str] = {}

    def stage(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return store.json(f"{home}/{name}", make, made_of=f"{made_of} {candidate.closer}")
        except UndefinedScore as error:
            undefined[name.removeprefix("grounding-")] = str(error)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
        return None

    closer, notes = candidate.closer, list(candidate.notes)
    if closer is None and (direction := stage("direction", lambda: {"closer": _direction(candidate, at)})) is not None:
        closer = direction["closer"]
        notes.append(f"closer={closer!r} was found by comparing networks with themselves")
    calibration = manipulation = None
    grounding: dict[str, dict[str, Any]] = {}
    if closer is not None:
        calibration = stage("calibration", partial(calibrate, candidate, closer, probes))
        for kind in PAIR_KINDS:
            correlations = stage(f"grounding-{kind}", partial(ground, candidate, closer, at, kind))
            grounding |= {} if correlations is None else {kind: correlations}
        unlike = None if calibration is None else calibration["clean"]["unlike"]
        far = None if unlike is None else unlike["mean"]
        manipulation = stage("manipulation", partial(manipulate, candidate, far, bench))
    gaps = [
        f"undefined for {result['pairs'] - result['defined']} of {result['pairs']} pairs that differ in {kind}: "
        f"{next(iter(result['undefined']), 'no reason given')}"
        for kind, result in grounding.items()
        if result["defined"] < result["pairs"]
    ]
    entry = Entry(candidate.name, candidate.of, closer, (*notes, *gaps), failures, undefined, calibration, grounding,
                  {}, manipulation)  # fmt: skip
    store.write(f"{home}/about", asdict(entry))  # last, since the leaderboard is made from it


def _direction(candidate: Candidate, at: Ground) -> Closer:
    """The direction of a measure, from networks compared with themselves and with others."""
    networks: Any = (at.activations if candidate.of == "activations" else at.population.models)[: 2 * TRIED]
    count = len(networks)
    same = values_of(candidate, networks, [(k, k) for k in range(count)], rows=candidate.rows)
    other = values_of(candidate, networks, [(k, (k + 1) % count) for k in range(count)], rows=candidate.rows)
    both = same.defined & other.defined
    if not both.any():
        raise ValueError(f"no value shows the direction: {next(iter(same.reasons + other.reasons))}")
    x, y = same.values[both], other.values[both]
    if (x >= y).all() and (x > y).any():
        return "up"
    if (x <= y).all() and (x < y).any():
        return "down"
    raise ValueError(
        f"networks compared with themselves have values of {x.min():.4g} to {x.max():.4g}, with others of "
        f"{y.min():.4g} to {y.max():.4g}: declare closer='up' or 'down'"
    )


def against_the_leader(board: Leaderboard, at: Ground) -> Leaderboard:
    """Add to each measure its difference from the first one, for each kind of pairs."""
    if board.leader is None:
        return board
    first = board[board.leader]
    entries = []
    for entry in board:
        against = {
            kind: difference(_oriented(entry, kind), _oriented(first, kind), at, kind, ALL, ranks=True)
            for kind in entry.grounding
            if kind in first.grounding and entry is not first
        }
        entries.append(replace(entry, against=against))
    return replace(board, entries=tuple(entries))


def _oriented(entry: Entry, kind: str) -> np.ndarray:
    values = np.array([np.nan if v is None else v for v in entry.grounding[kind]["values"]], dtype=np.float64)
    return values if entry.closer == "up" else -values
