"""What a sketch keeps of one site: sums over rows, so that parts of the data merge exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ..lottery import row_hash

PARTS = ("features", "gradients", "hadamard", "maps")  # what may be sketched of a site


@dataclass(frozen=True)
class Part:
    """S Ψ for one map ψ of the rows, and what it takes to centre it and to know what sketching did to it."""

    rows: Tensor  # (M, k) S Ψ; in two copies (2, M, k) for the sketch of f ⊗ g
    total: Tensor  # (k,) or (2, k): Σ ψ, in float64
    squares: Tensor  # Σ ‖ψ‖², exact even where ψ itself is only sketched
    diagonal: Tensor  # (M,) S (‖ψ₁‖², ‖ψ₂‖², …)

    def merge(self, other: Part, *, order: Tensor | None) -> Part:
        """Sums; rows that were not sketched are put into their order."""
        if order is not None:
            rows = torch.cat([self.rows, other.rows], -2)[..., order, :]
            diagonal = torch.cat([self.diagonal, other.diagonal])[order]
        else:
            rows, diagonal = self.rows + other.rows, self.diagonal + other.diagonal
        return Part(rows, self.total + other.total, self.squares + other.squares, diagonal)


@dataclass(frozen=True)
class Pairs:
    """A few rows as they are, those with the smallest hash: what pairs of rows tell must not come from a sketch."""

    features: Tensor  # (rows, k)
    gradients: Tensor
    index: np.ndarray  # their global indices, ascending
    most: int
    seed: int

    def merge(self, other: Pairs) -> Pairs:
        index = np.concatenate([self.index, other.index])
        order = smallest(index, self.most, self.seed)
        take = torch.from_numpy(order).to(self.features.device)
        features, gradients = (
            torch.cat([getattr(self, name), getattr(other, name)])[take] for name in ("features", "gradients")
        )
        return replace(self, features=features, gradients=gradients, index=index[order])


def smallest(index: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Where the `most` smallest hashes are, in the order of the index."""
    order = np.argsort(row_hash(index, seed), kind="stable")[:most]
    return order[np.argsort(index[order])]


@dataclass(frozen=True)
class SiteSketch:
    """All that is kept of one site."""

    width: int  # columns of its rows, before they were projected
    features: Part | None
    gradients: Part | None
    hadamard: Part | None  # of f ⊗ g, by TensorSketch
    maps: Part | None  # of the products of f and g, neuron by neuron
    inner: Tensor | None  # Σ ⟨f, g⟩²
    fourth: Tensor | None  # Σ (‖f‖² ‖g‖²)²
    moment: Tensor | None  # (k, k) Σ g fᵀ, where that is small
    pairs: Pairs | None
    trace: Tensor | None = None  # Σ ‖f‖² ‖g‖², the trace of K_f ∘ K_g

    @property
    def folded(self) -> int | None:
        """The columns that wider rows were projected to."""
        part = self.features or self.gradients or self.maps
        return None if part is None or part.rows.shape[-1] == self.width else part.rows.shape[-1]

    def merge(self, other: SiteSketch, *, order: Tensor | None) -> SiteSketch:
        merged: dict[str, object] = {"width": self.width}
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name == "width":
                continue
            if mine is None or theirs is None:
                merged[f.name] = None
            elif isinstance(mine, Part):
                merged[f.name] = mine.merge(theirs, order=order)
            elif isinstance(mine, Pairs):
                merged[f.name] = mine.merge(theirs)
            else:
                merged[f.name] = mine + theirs
        return SiteSketch(**merged)  # type: ignore[arg-type]

    def check(self, height: int) -> None:
        """Raise unless all fits together for that many buckets: files come from others."""
        for name in PARTS:
            part = getattr(self, name)
            if part is None:
                continue
            copies, columns = part.rows.shape[:-2], part.rows.shape[-1]
            if part.rows.shape[-2] != height or part.diagonal.shape != (height,) or len(copies) != (name == "hadamard"):
                raise ValueError(f"{name} has shape {tuple(part.rows.shape)}, not {height} rows")
            if part.total.shape != (*copies, columns) or part.squares.ndim or float(part.squares) < 0:
                raise ValueError(f"the sums of {name} do not fit its rows")
            if name != "hadamard" and columns != (self.folded or self.width):
                raise ValueError(f"{name} has {columns} columns, not {self.folded or self.width}")
        for found in (self.inner, self.fourth, self.trace):
            if found is not None and (found.ndim or float(found) < 0):
                raise ValueError("its sums of squared products are no numbers from 0 on")
        if self.moment is not None and (self.moment.ndim != 2 or self.moment.shape[0] != self.moment.shape[1]):
            raise ValueError(f"its moment has shape {tuple(self.moment.shape)}")
        if self.pairs is not None:
            f, g, index = self.pairs.features, self.pairs.gradients, self.pairs.index
            if f.ndim != 2 or f.shape != g.shape or index.shape != (len(f),) or len(f) > self.pairs.most:
                raise ValueError(f"its pairs have shapes {tuple(f.shape)}, {tuple(g.shape)} and {index.shape}")

    def shapes(self) -> tuple[object, ...]:
        """What must agree for two to be merged."""
        kept: Sequence[Part | None] = [getattr(self, name) for name in PARTS]
        return (self.width, *(None if part is None else part.rows.shape[-1] for part in kept))
