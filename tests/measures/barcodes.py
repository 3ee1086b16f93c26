"""Persistent homology of small graphs by reduction of the whole boundary matrix: slow, plain, nobody else's code."""

from __future__ import annotations

from itertools import combinations

import numpy as np


def bars(lengths: np.ndarray, dimension: int = 1) -> list[tuple[float, float]]:
    """(birth, death) of the classes of the clique complex of a graph with these edge lengths; inf: never joined."""
    points = range(len(lengths))
    simplices = [s for size in range(1, dimension + 3) for s in combinations(points, size)]

    def entry(simplex: tuple[int, ...]) -> float:
        return max((float(lengths[a, b]) for a, b in combinations(simplex, 2)), default=0.0)

    present = sorted((entry(s), len(s), s) for s in simplices)
    present = [(time, size, s) for time, size, s in present if np.isfinite(time)]
    place = {s: i for i, (_, _, s) in enumerate(present)}
    columns: dict[int, set[int]] = {}  # by the last row that is not zero
    paired, found = set(), []
    for i, (time, size, s) in enumerate(present):
        column = {place[face] for face in combinations(s, size - 1)} if size > 1 else set()
        while column and max(column) in columns:
            column = column ^ columns[max(column)]
        if column:
            columns[max(column)] = column
            born, size_born, _ = present[max(column)]
            paired |= {i, max(column)}
            if size_born == dimension + 1 and time > born:
                found.append((born, time))
    alive = [(t, np.inf) for i, (t, size, _) in enumerate(present) if size == dimension + 1 and i not in paired]
    return sorted(found + alive)
