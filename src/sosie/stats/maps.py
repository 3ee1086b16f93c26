"""Views of two linear maps, from their matrices: rows are the entries of the input, columns the outputs."""

from __future__ import annotations

from torch import Tensor

from ..linalg import centred, unit
from .weight_views import LinearMaps, UncentredLinearMaps


def linear_maps(x: Tensor, y: Tensor, view: type[LinearMaps] = LinearMaps) -> LinearMaps:
    """The view of maps x (d, p) and y (d, q) of one input; has gradients."""
    if x.dim() != 2 or y.dim() != 2:
        raise ValueError(f"a linear map is (inputs, outputs), got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    if len(x) != len(y):
        raise ValueError(f"need maps of one input, got {len(x)} and {len(y)} entries")
    x, y = unit(x), unit(y)
    if not issubclass(view, UncentredLinearMaps):
        x, y = centred(x), centred(y)
    return view(_squares(x, x), _squares(y, y), _squares(x, y))


def _squares(x: Tensor, y: Tensor) -> Tensor:
    """⟨x xᵀ, y yᵀ⟩, by whichever way is shorter."""
    if x.shape[1] * y.shape[1] <= len(x) * (x.shape[1] + y.shape[1]):
        return (x.T @ y).square().sum()
    return ((x @ x.T) * (y @ y.T)).sum()
