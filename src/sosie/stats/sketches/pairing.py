"""The rows of a site that are kept as they are, for pairs of rows, as they appear."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...linalg import for_numpy
from ..lottery import Lottery
from .site import Pairs, smallest


class Takes:
    """Which rows of a chunk are kept: sites that keep as many share the draw, and its copy on a device."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lotteries: dict[int, Lottery] = {}
        self._places: dict[tuple[int, torch.device], tuple[np.ndarray, Tensor]] = {}

    def draw(self, most: int, start: int, rows: Tensor) -> tuple[np.ndarray, Tensor | None]:
        """Global indices kept of rows whose first has the index `start`, and where they are; None: all are kept."""
        if most not in self._lotteries:
            self._lotteries[most] = Lottery(most, self.seed)
        index = self._lotteries[most].draw(start, len(rows))
        if len(index) == len(rows):
            return index, None
        key = most, rows.device
        if key not in self._places or self._places[key][0] is not index:  # the same array for the same chunk
            self._places[key] = index, _on(rows.device, index - start)
        return self._places[key]


class Pairing:
    """The rows of features and gradients with the smallest hashes so far; chunks come in the order of their rows."""

    def __init__(self, most: int, takes: Takes) -> None:
        self.most, self._takes = most, takes
        self._lots: list[tuple[np.ndarray, Tensor, Tensor]] = []

    def add(self, f: Tensor, g: Tensor, start: int) -> None:
        index, take = self._takes.draw(self.most, start, f)
        if len(index):
            self._lots.append((index, _taken([f], [take], len(index)), _taken([g], [take], len(index))))
        if sum(len(index) for index, *_ in self._lots) > 2 * self.most:
            self._lots = [self._smallest()]

    def finish(self) -> Pairs:
        index, f, g = self._smallest()
        return Pairs(f, g, index, self.most, self._takes.seed)

    def _smallest(self) -> tuple[np.ndarray, Tensor, Tensor]:
        """Those that stay, each copied once at most."""
        indices, fs, gs = zip(*self._lots, strict=True)
        index = np.concatenate(indices)
        order = smallest(index, self.most, self._takes.seed)
        if len(self._lots) == 1 and len(order) == len(index):
            return self._lots[0]
        takes: list[Tensor | None] = []
        first = 0
        for lot in indices:
            chosen = order[(order >= first) & (order < first + len(lot))] - first
            takes.append(None if len(chosen) == len(lot) else _on(fs[0].device, chosen))
            first += len(lot)
        return index[order], _taken(fs, takes, len(order)), _taken(gs, takes, len(order))


def _taken(lots: list[Tensor] | tuple[Tensor, ...], takes: list[Tensor | None], count: int) -> Tensor:
    """(count, k): what is taken of each lot, one after the other; None takes all of it."""
    found = blank(lots[0], (count, lots[0].shape[1]))
    first = 0
    for rows, take in zip(lots, takes, strict=True):
        place = found[first : first + (len(rows) if take is None else len(take))]
        if take is None:
            place.copy_(rows)
        elif for_numpy(rows):
            np.take(rows.numpy(), take.numpy(), axis=0, out=place.numpy(), mode="clip")  # others copy twice
        else:
            torch.index_select(rows, 0, take, out=place)
        first += len(place)
    return found


def blank(like: Tensor, shape: tuple[int, ...], *, zero: bool = False) -> Tensor:
    """Room for numbers of a tensor's kind, where it is.

    On a CPU from NumPy, which asks for large pages: with small ones, the first touch of each takes longer than the
    sums.
    """
    if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
        return like.new_zeros(shape) if zero else like.new_empty(shape)
    kind = np.float32 if like.dtype == torch.float32 else np.float64
    return torch.from_numpy(np.zeros(shape, kind) if zero else np.empty(shape, kind))


def _on(device: torch.device, numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(numbers).to(device, non_blocking=True)
