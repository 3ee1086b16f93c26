"""The benchmark from the first network to the leaderboard; units of work that the folder holds are not done again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..engine.provenance import provenance
from ..measures import MEASURES
from ..process_state import products
from ..progress import Progress
from ..results import Closer, Entry, Leaderboard
from .candidates import Candidate, Of, open_candidates, values_of
from .population import (
    ALL,
    KINDS,
    Scale,
    Store,
    agreements,
    groups,
    make_population,
    measure_folder,
    open_benchmark_images,
    open_scale,
)
from .trials import Bench, Ground, Probes, Undefined, calibrate, difference, ground, manipulate

TRIED = 3  # networks that are manipulated, and from which the direction of a measure is found


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
    """Put measures to the test: calibration, correlation with how far networks agree, manipulation.

    `measures`: names of sosie's, with options ("mutual_knn(k=5)"), `file.py:function`, or callables f(x, y) of two
    NumPy arrays (n, p) and (n, q), rows paired (`f.takes = "torch"`: tensors), or of two networks (`f.of = "models"`,
    or `of=`); None: all of sosie's. `closer`: "up" if larger means more alike, for functions that do not declare it
    (`f.closer`); by default it is found by comparing networks with themselves. `rows`: images at most.

    `scale`: "smoke" (seconds), "small" (minutes on a CPU) or "paper" (a GPU). Work is kept in `folder`: after an
    interruption, or with other measures, it goes on from there, and the leaderboard has all measures tested in it.
    `resume=False` does everything anew.
    """
    chosen = open_scale(scale)
    candidates = open_candidates(measures, chosen, of=of, closer=closer, rows=rows)
    place = torch.device("cpu" if device is None else device)
    images = open_benchmark_images(chosen, seed=seed, device=place)
    store = Store(folder, {"scale": asdict(chosen), "data": images.name, "seed": seed}, resume=resume)
    population = make_population(chosen, images, store, seed=seed)
    agreement = agreements(chosen, images, population, store, seed=seed)
    at = Ground(chosen, population, agreement, images.test, seed=seed)
    probes = Probes(chosen, images, population, seed=seed)
    bench = Bench([run[-1] for run in population.converged[:TRIED]], images.test, seed=seed)
    with Progress("testing measures", len(candidates), "measures") as bar:
        for candidate in candidates:
            put_to_the_test(candidate, store, at, probes, bench)
            bar.advance(note=candidate.name)
    entries = [Entry(**{**kept, "notes": tuple(kept["notes"])}) for kept in store.of_measures()]
    board = Leaderboard(
        scale=asdict(chosen),
        data={
            "name": images.name,
            "train": len(images.train),
            "test": len(images.test),
            "networks": len(population.models),
            "runs": len(set(population.runs)),
            "untrained": len(population.untrained),
            "consecutive_pairs": sum(len(run) - 1 for run in population.converged),
        },
        pairs={kind: len(at.pairs(kind)) for kind in KINDS},
        conditions=groups(chosen),
        entries=tuple(entries),
        left_out={m.name: "compares what models answer: what measures are held against" for m in MEASURES.values()
                  if m.reads_outputs},
        provenance=provenance(seed=seed, device=str(place)),
    )  # fmt: skip
    board = against_the_leader(board, at)
    board.save(store.folder / "leaderboard.json")
    return board


def put_to_the_test(candidate: Candidate, store: Store, at: Ground, probes: Probes, bench: Bench) -> None:
    """Run all stages, each a unit of work; where one fails the reason is kept, and the others go on."""
    home, made_of = measure_folder(candidate.name), f"{candidate.made_of} {candidate.of} {candidate.rows}"
    failures: dict[str, str] = {}
    undefined: dict[str, str] = {}

    def stage(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return store.json(f"{home}/{name}", make, made_of=f"{made_of} {candidate.closer}")
        except Undefined as error:
            undefined[name.removeprefix("grounding-")] = str(error)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
        return None

    closer, notes = candidate.closer, list(candidate.notes)
    if closer is None and (way := stage("direction", lambda: {"closer": _direction(candidate, at)})) is not None:
        closer = way["closer"]
        notes.append(f"closer={closer!r} was found by comparing networks with themselves")
    calibration = manipulation = None
    grounding: dict[str, dict[str, Any]] = {}
    if closer is not None:
        calibration = stage("calibration", partial(calibrate, candidate, closer, probes))
        for kind in KINDS:
            correlations = stage(f"grounding-{kind}", partial(ground, candidate, closer, at, kind))
            grounding |= {} if correlations is None else {kind: correlations}
        unlike = None if calibration is None else calibration["clean"]["unlike"]
        far = None if unlike is None else unlike["mean"]
        manipulation = stage("manipulation", partial(manipulate, candidate, far, bench))
    gaps = [
        f"undefined for {each['pairs'] - each['defined']} of {each['pairs']} pairs that differ in {kind}: "
        f"{next(iter(each['undefined']), 'no reason given')}"
        for kind, each in grounding.items()
        if each["defined"] < each["pairs"]
    ]
    entry = Entry(candidate.name, candidate.of, closer, (*notes, *gaps), failures, undefined, calibration, grounding,
                  {}, manipulation)  # fmt: skip
    store.write(f"{home}/about", asdict(entry))  # last: it is what the leaderboard is made from


def _direction(candidate: Candidate, at: Ground) -> Closer:
    """Whether larger or smaller is closer: networks with themselves against networks with others."""
    every: Any = at.activations if candidate.of == "activations" else at.population.models
    things, count = every[: 2 * TRIED], len(every[: 2 * TRIED])
    own = values_of(candidate, things, [(k, k) for k in range(count)], rows=candidate.rows)
    other = values_of(candidate, things, [(k, (k + 1) % count) for k in range(count)], rows=candidate.rows)
    both = own.defined & other.defined
    if not both.any():
        raise ValueError(f"no value shows the direction: {next(iter(own.reasons + other.reasons))}")
    gap = own.values[both] - other.values[both]
    if (gap >= 0).all() and (gap > 0).any():
        return "up"
    if (gap <= 0).all() and (gap < 0).any():
        return "down"
    raise ValueError(
        f"networks compared with themselves have values of {own.values[both].min():.4g} to "
        f"{own.values[both].max():.4g}, with others of {other.values[both].min():.4g} to "
        f"{other.values[both].max():.4g}: declare closer='up' or 'down'"
    )


def against_the_leader(board: Leaderboard, at: Ground) -> Leaderboard:
    """Each measure with its difference from the first one, kind by kind."""
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
