"""Coordinate descent over orders of neurons: one group of axes at a time is assigned anew, the others held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...capture.axes import Axis, WeightAxes, leaves, places_of
from ...linalg import best_assignment
from .symmetry import Orders, reordered

SWEEPS = 200  # far more than any descent took
GAIN = 1e-10  # of the size of all weights: less is rounding, and could go round in circles


@dataclass(frozen=True)
class Run:
    orders: dict[Axis, Tensor]
    history: tuple[float, ...]  # cosines: at the start, after each sweep


@dataclass(frozen=True)
class Slices:
    """One axis of one tensor that holds a group: which of its entries belong to each entry of the group."""

    name: str
    dim: int
    places: Tensor  # (entries of the group, entries of the axis that belong to each)


@dataclass(frozen=True, eq=False)
class Problem:
    """The parameters of A and B in float64, and which axes hold which group."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    axes: dict[str, tuple[Axis, ...]]
    slices: dict[Axis, tuple[Slices, ...]]
    size: float  # product of the norms of all of A's and all of B's parameters

    @classmethod
    def of(cls, a: Mapping[str, Tensor], b: Mapping[str, Tensor], axes: WeightAxes) -> Problem:
        device = next(iter(b.values())).device
        ours, theirs = ({name: t.detach().to(device, torch.float64) for name, t in side.items()} for side in (a, b))
        slices = {}
        for name, group in axes.groups.items():
            members = [(tensor, dim) for tensor, dim in axes.members(name) if tensor in theirs]
            slices[group] = tuple(
                Slices(tensor, dim, places)
                for tensor, dim in members
                for places in places_of(axes.of[tensor][dim], group)
            )
        norms = [sum(float(t.square().sum()) for t in side.values()) ** 0.5 for side in (ours, theirs)]
        if not norms[0] * norms[1]:
            raise ValueError(f"all parameters of {'A' if not norms[0] else 'B'} are 0: there is nothing to match")
        return cls(ours, theirs, axes.of, slices, norms[0] * norms[1])

    def cosine(self, orders: Orders) -> float:
        """Of all parameters, with B's in these orders."""
        products = (float((a * reordered(self.b[n], self.axes[n], orders)).sum()) for n, a in self.a.items())
        return sum(products) / self.size

    def scores(self, group: Axis, orders: Orders, only: Sequence[Slices] | None = None) -> Tensor:
        """(entries of A, entries of B): inner products of all weights that hold the group, other groups in order."""
        total = torch.zeros(group.size, group.size, dtype=torch.float64, device=next(iter(self.b.values())).device)
        others = {axis: order for axis, order in orders.items() if axis is not group}
        for slices in self.slices[group] if only is None else only:
            a, axes = self.a[slices.name], self.axes[slices.name]
            b = reordered(self.b[slices.name], axes[: slices.dim], orders)
            for i in range(slices.dim, len(axes)):
                moved = reordered(b.movedim(i, 0), axes[i : i + 1], others if i == slices.dim else orders)
                b = moved.movedim(0, i)
            places = slices.places.to(b.device)
            x, y = (side.movedim(slices.dim, 0)[places].flatten(1) for side in (a, b))
            total += x @ y.T
        return total

    def outwards(self, *, backwards: bool = False) -> dict[Axis, Tensor]:
        """A start: groups from the input on (or back from the output), by weights whose other axes are settled."""
        orders: dict[Axis, Tensor] = {}
        for group in reversed(self.slices) if backwards else self.slices:
            settled = [s for s in self.slices[group] if self._is_settled(s, group, orders)]
            orders[group] = best_assignment(self.scores(group, orders, settled or None))[1].cpu()
        return orders

    def _is_settled(self, slices: Slices, group: Axis, orders: Orders) -> bool:
        inside = {each for axis in self.axes[slices.name] for each in leaves(axis)}
        return all(each is group or each in orders or each not in self.slices for each in inside)

    def descend(self, start: Orders, generator: torch.Generator) -> Run:
        """Sweep over the groups, in a random order each time, until none improves."""
        orders, groups = dict(start), list(self.slices)
        history = [self.cosine(orders)]
        for _ in range(SWEEPS):
            sweep = torch.randperm(len(groups), generator=generator).tolist()
            improved = [self._improve(groups[i], orders) for i in sweep]
            if not any(improved):
                break
            history.append(self.cosine(orders))
        return Run(orders, tuple(history))

    def _improve(self, group: Axis, orders: dict[Axis, Tensor]) -> bool:
        """Assign one group anew; whether that brings the weights nearer."""
        scores = self.scores(group, orders)
        rows = torch.arange(group.size)
        before = orders.get(group, rows)
        after = best_assignment(scores)[1].cpu()
        names = [slices.name for slices in self.slices[group]]
        if len(set(names)) == len(names):
            gain = float((scores[rows, after] - scores[rows, before]).sum())
        else:
            # A tensor that holds the group twice counts with its square, of which the scores are the slope.
            gain = (self.cosine({**orders, group: after}) - self.cosine({**orders, group: before})) * self.size
        if gain <= GAIN * self.size:
            return False
        orders[group] = after
        return True
