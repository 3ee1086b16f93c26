"""What measures of weights read."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """What two models are made of; no data."""


@dataclass(frozen=True)
class LinearMaps(Weights):
    """Inner products of the Gram matrices W Wᵀ of two maps, entry by entry of their input, centred over the entries.

    Shapes broadcast as those of `Alignment` do.
    """

    xx: Tensor
    yy: Tensor
    xy: Tensor


@dataclass(frozen=True)
class UncentredLinearMaps(LinearMaps):
    """The same from the Gram matrices as they are."""


@dataclass(frozen=True)
class TensorPair(Weights):
    """Two tensors of weights of one shape, the first axis being that of the neurons; float64."""

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
