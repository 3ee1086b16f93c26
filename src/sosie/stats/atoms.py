"""Atoms of many models as one table, so that all pairs are one matrix product."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .views import Atoms


@dataclass(frozen=True, eq=False)
class AtomTable:
    """One row a model: its atoms layer after layer, each layer of length 1/√layers.

    The product of two rows is the mean over layers of the cosine of the atoms. Nothing else is kept, so the table takes
    the memory of the atoms; tables of the same layers merge, and so do tables of a million models.
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of each layer: (atoms, height, width)
    rows: Tensor  # (models, entries of all layers), float32 unless asked otherwise

    @staticmethod
    def of(
        models: Mapping[str, Mapping[str, Tensor]] | Sequence[Mapping[str, Tensor]], dtype: torch.dtype = torch.float32
    ) -> AtomTable:
        """From the atoms (m, height, width) of every layer of every model; models by name, or in a list."""
        named = dict(models) if isinstance(models, Mapping) else {str(k): atoms for k, atoms in enumerate(models)}
        if not named:
            raise ValueError("no models: a table of atoms needs at least one")
        first, shapes = next(iter(named.items()))
        layout = {layer: tuple(atoms.shape) for layer, atoms in shapes.items()}
        if not layout:
            raise ValueError(f"{first} has no layer of atoms")
        for name, atoms in named.items():
            _check(name, atoms, first, layout)
        stacked = {layer: torch.stack([atoms[layer].detach() for atoms in named.values()]) for layer in layout}
        return AtomTable.stacked(stacked, tuple(named), dtype)

    @staticmethod
    def stacked(
        layers: Mapping[str, Tensor], names: Sequence[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> AtomTable:
        """From the atoms of all models at once, (models, m, height, width) for each layer."""
        _check_stack(layers, names, dtype)
        shapes = tuple(tuple(atoms.shape[1:]) for atoms in layers.values())
        first = next(iter(layers.values()))
        count = len(first)
        wide = torch.promote_types(dtype, torch.float32)  # atoms are rounded once they are of length 1, not before
        rows = torch.empty(count, sum(math.prod(shape) for shape in shapes), dtype=dtype, device=first.device)
        start = 0
        for layer, atoms in layers.items():
            flat = atoms.detach().flatten(1).to(first.device, wide)
            norms = torch.linalg.vector_norm(flat.double(), dim=1)
            _check_norms(norms, layer, names)
            part = rows[:, start : start + flat.shape[1]]
            torch.mul(flat, (1 / (norms * math.sqrt(len(shapes)))).to(wide)[:, None], out=part)
            start += flat.shape[1]
        own = tuple(map(str, range(count))) if names is None else tuple(names)
        return AtomTable(own, tuple(layers), shapes, rows)

    def merge(self, other: AtomTable) -> AtomTable:
        """Both tables' models, ours first."""
        if (self.layers, self.shapes) != (other.layers, other.shapes):
            raise ValueError(f"tables of other layers: {_layout(self)} and {_layout(other)}")
        return replace(self, names=self.names + other.names, rows=torch.cat([self.rows, other.rows]))

    def cosines(self) -> Tensor:
        """Mean over layers of the atom cosine, for all pairs of models (N, N): one product."""
        return self.rows @ self.rows.T

    def nearest(self, model: int | AtomTable) -> Tensor:
        """Mean atom cosine of every model with one of them, or with each model of another table: (N,) or (N, M)."""
        if isinstance(model, int):
            return self.rows @ self.rows[model]
        if (self.layers, self.shapes) != (model.layers, model.shapes):
            raise ValueError(f"tables of other layers: {_layout(self)} and {_layout(model)}")
        return self.rows @ model.rows.T

    def at(self, layer: str) -> Atoms:
        """What measures read of one layer, for all pairs; each model's atoms are of norm 1/√layers."""
        k = self.layers.index(layer)
        start = sum(math.prod(shape) for shape in self.shapes[:k])
        part = self.rows[:, start : start + math.prod(self.shapes[k])].view(len(self.rows), self.shapes[k][0], -1)
        return Atoms(part, part)

    def __repr__(self) -> str:
        return (
            f"<AtomTable of {len(self.names)} models: {len(self.layers)} layers, {self.rows.shape[1]:,} entries each>"
        )


def _check(name: str, atoms: Mapping[str, Tensor], first: str, layout: Mapping[str, tuple[int, ...]]) -> None:
    shapes = {layer: tuple(tensor.shape) for layer, tensor in atoms.items()}
    if shapes != layout:
        layer = next(layer for layer in [*layout, *shapes] if layout.get(layer) != shapes.get(layer))
        raise ValueError(
            f"{layer}: {first} has atoms of {layout.get(layer, 'no such layer')}, {name} of "
            f"{shapes.get(layer, 'no such layer')}; atoms (number, height, width) must be alike to be compared"
        )


def _check_stack(layers: Mapping[str, Tensor], names: Sequence[str] | None, dtype: torch.dtype) -> None:
    if not layers:
        raise ValueError("no layers: a table of atoms needs at least one")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: a table of atoms holds floating point numbers")
    counts = {layer: len(atoms) for layer, atoms in layers.items()}
    first, count = next(iter(counts.items()))
    if odd := next((layer for layer in counts if counts[layer] != count), None):
        raise ValueError(f"{odd} has atoms of {counts[odd]} models, {first} of {count}")
    if names is not None and len(names) != count:
        raise ValueError(f"{len(names)} names for {count} models")


def _check_norms(norms: Tensor, layer: str, names: Sequence[str] | None) -> None:
    bad = (~torch.isfinite(norms) | (norms == 0)).nonzero().flatten().tolist()
    if bad:
        who = f"model {bad[0]}" if names is None else names[bad[0]]
        what = "are all 0: they have no direction" if float(norms[bad[0]]) == 0 else "are NaN or infinite"
        raise ValueError(f"{layer}: the atoms of {who} {what}")


def _layout(table: AtomTable) -> str:
    return ", ".join(f"{layer} {shape}" for layer, shape in zip(table.layers, table.shapes, strict=True))
