"""Views that measures of weights read: linear maps, tensors, filter atoms; and a table of the atoms of many models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..linalg import centred, unit


@dataclass(frozen=True)
class Weights:
    """The weights of two models, without data."""


@dataclass(frozen=True)
class LinearMaps(Weights):
    """Inner products of the Gram matrices W Wᵀ of two maps, centred over the entries of their input.

    Shapes broadcast as in `Alignment`.
    """

    xx: Tensor
    yy: Tensor
    xy: Tensor


class UncentredLinearMaps(LinearMaps):
    """Inner products of the uncentred Gram matrices of two maps."""


@dataclass(frozen=True)
class TensorPair(Weights):
    """Two weight tensors of one shape in float64, with neurons along the first axis."""

    x: Tensor
    y: Tensor
    kept: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)  # of one side, by id

    def __post_init__(self) -> None:
        if self.x.shape != self.y.shape:
            raise ValueError(f"need weights of one shape, got {tuple(self.x.shape)} and {tuple(self.y.shape)}")


@dataclass(frozen=True)
class Atoms(Weights):
    """Filter atoms of N and M models at one layer, (N, m, d) and (M, m, d): m atoms of d entries each.

    Atom i of one model belongs to atom i of another only where the models share their coefficients.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.ndim != 3 or self.x.shape[1:] != self.y.shape[1:]:
            raise ValueError(
                f"need atoms (models, atoms, entries) of one number and size, got {tuple(self.x.shape)} and "
                f"{tuple(self.y.shape)}"
            )


def linear_maps(x: Tensor, y: Tensor, view: type[LinearMaps] = LinearMaps) -> LinearMaps:
    """The view of maps x (d, p) and y (d, q) of one input; differentiable."""
    if x.dim() != 2 or y.dim() != 2:
        raise ValueError(f"a linear map is (inputs, outputs), got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    if len(x) != len(y):
        raise ValueError(f"need maps of one input, got {len(x)} and {len(y)} entries")
    x, y = unit(x), unit(y)
    if not issubclass(view, UncentredLinearMaps):
        x, y = centred(x), centred(y)
    return view(_squares(x, x), _squares(y, y), _squares(x, y))


def _squares(x: Tensor, y: Tensor) -> Tensor:
    """⟨x xᵀ, y yᵀ⟩, by whichever product is cheaper."""
    if x.shape[1] * y.shape[1] <= len(x) * (x.shape[1] + y.shape[1]):
        return (x.T @ y).square().sum()
    return ((x @ x.T) * (y @ y.T)).sum()


@dataclass(frozen=True, eq=False)
class AtomTable:
    """One row per model: its atoms layer after layer, each layer of length 1/√layers.

    The product of two rows is the mean over layers of the cosine of the atoms. The table takes the memory of the atoms,
    and tables of the same layers merge.
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of each layer: (atoms, height, width)
    rows: Tensor  # (models, entries of all layers), float32 by default

    @staticmethod
    def of(
        models: Mapping[str, Mapping[str, Tensor]] | Sequence[Mapping[str, Tensor]], dtype: torch.dtype = torch.float32
    ) -> AtomTable:
        """From the atoms (m, height, width) of every layer of every model; models by name, or in a list."""
        named = dict(models) if isinstance(models, Mapping) else {str(k): atoms for k, atoms in enumerate(models)}
        shapes = {name: {layer: tuple(a.shape) for layer, a in atoms.items()} for name, atoms in named.items()}
        first, layout = next(iter(shapes.items()), ("", {}))
        for name, other in shapes.items():
            if odd := next((layer for layer in {**layout, **other} if layout.get(layer) != other.get(layer)), None):
                a, b = (side.get(odd, "no such layer") for side in (layout, other))
                raise ValueError(f"{odd}: {first} has atoms of {a}, {name} of {b}; need one (number, height, width)")
        stacked = {layer: torch.stack([atoms[layer].detach() for atoms in named.values()]) for layer in layout}
        return AtomTable.stacked(stacked, tuple(named), dtype)

    @staticmethod
    def stacked(
        layers: Mapping[str, Tensor], names: Sequence[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> AtomTable:
        """From the atoms of all models at once, (models, m, height, width) for each layer."""
        if not layers:
            raise ValueError("a table of atoms needs at least one model with one layer of atoms")
        shapes = tuple(tuple(atoms.shape[1:]) for atoms in layers.values())
        first_layer, first = next(iter(layers.items()))
        count = len(first)
        for layer, atoms in layers.items():
            if len(atoms) != count:
                raise ValueError(f"{layer} has atoms of {len(atoms)} models, {first_layer} of {count}")
        if names is not None and len(names) != count:
            raise ValueError(f"{len(names)} names for {count} models")
        wide = torch.promote_types(dtype, torch.float32)  # atoms are rounded after they are scaled
        rows = torch.empty(count, sum(math.prod(shape) for shape in shapes), dtype=dtype, device=first.device)
        start = 0
        for layer, atoms in layers.items():
            flat = atoms.detach().flatten(1).to(first.device, wide)
            norms = torch.linalg.vector_norm(flat.double(), dim=1)
            if bad := (~torch.isfinite(norms) | (norms == 0)).nonzero().flatten().tolist():
                who = f"model {bad[0]}" if names is None else names[bad[0]]
                what = "are all 0: they have no direction" if float(norms[bad[0]]) == 0 else "are NaN or infinite"
                raise ValueError(f"{layer}: the atoms of {who} {what}")
            part = rows[:, start : start + flat.shape[1]]
            torch.mul(flat, (1 / (norms * math.sqrt(len(shapes)))).to(wide)[:, None], out=part)
            start += flat.shape[1]
        return AtomTable(tuple(map(str, range(count)) if names is None else names), tuple(layers), shapes, rows)

    def merge(self, other: AtomTable) -> AtomTable:
        """The models of both tables, first those of this one."""
        self._check_layers(other)
        return replace(self, names=self.names + other.names, rows=torch.cat([self.rows, other.rows]))

    def cosines(self) -> Tensor:
        """Mean over layers of the atom cosine, for all pairs of models: (N, N)."""
        return self.rows @ self.rows.T

    def nearest(self, model: int | AtomTable) -> Tensor:
        """Mean atom cosine of every model with one model, or with each model of another table: (N,) or (N, M)."""
        if isinstance(model, int):
            return self.rows @ self.rows[model]
        self._check_layers(model)
        return self.rows @ model.rows.T

    def at(self, layer: str) -> Atoms:
        """The view of one layer, for all pairs; the atoms of each model have norm 1/√layers."""
        k = self.layers.index(layer)
        start = sum(math.prod(shape) for shape in self.shapes[:k])
        part = self.rows[:, start : start + math.prod(self.shapes[k])].view(len(self.rows), self.shapes[k][0], -1)
        return Atoms(part, part)

    def _check_layers(self, other: AtomTable) -> None:
        if (self.layers, self.shapes) != (other.layers, other.shapes):
            texts = [
                ", ".join(f"{layer} {shape}" for layer, shape in zip(table.layers, table.shapes, strict=True))
                for table in (self, other)
            ]
            raise ValueError(f"these tables have different layers: {' and '.join(texts)}")

    def __repr__(self) -> str:
        return (
            f"<AtomTable of {len(self.names)} models: {len(self.layers)} layers, {self.rows.shape[1]:,} entries each>"
        )
