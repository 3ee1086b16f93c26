"""One measure of weights on two maps, or two tensors, that are given as arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...capture import number_array
from ...linalg import chain_products, near_one, vanishes
from ...measures import Measure, settled
from ...stats import Atoms, LinearMaps, TensorPair, linear_maps


def of_weights(chosen: Measure, x: Any, y: Any) -> float:
    """The value for two maps (d, p) and (d, q), each a matrix or a list of factors; or for two tensors of one shape.

    Of atoms, these are (m, height, width) of two models that share their coefficients.
    """
    with torch.no_grad():
        if issubclass(chosen.reads, LinearMaps):
            a, b = _map(x, "x"), _map(y, "y")
            view = linear_maps(a, b.to(a.device), chosen.reads)
            for label, size, matrix in (("x", view.xx, a), ("y", view.yy, b)):
                if vanishes(float(size.sqrt()), float(matrix.square().sum() / matrix.abs().max() ** 2)):
                    raise ValueError(
                        f"{label} is the same for each of its {len(matrix)} inputs: nothing is left to compare"
                    )
            return float(settled(chosen(view), chosen))
        a, b = _tensor(x, "x"), _tensor(y, "y")
        if chosen.reads is Atoms:
            return float(settled(chosen(_atoms(chosen, a, b)), chosen))
        if a.shape != b.shape:
            raise ValueError(f"{chosen.name} compares tensors of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
        if "scale" in chosen.invariant:
            a, b = near_one(a), near_one(b)
        else:
            a, b = near_one(torch.stack([a, b.to(a.device)]))  # both by the same
        value = float(settled(chosen(TensorPair(a, b.to(a.device))), chosen))
    if math.isnan(value):
        raise ValueError(f"{chosen.name} is undefined here: one of the tensors is zero")
    return value


def _atoms(chosen: Measure, a: Tensor, b: Tensor) -> Atoms:
    for label, side in (("x", a), ("y", b)):
        if side.ndim not in (2, 3) or not side.numel():
            raise ValueError(
                f"{label}: atoms are (number, height, width), or (number, entries); got {tuple(side.shape)}"
            )
    if a.shape != b.shape:
        raise ValueError(f"{chosen.name} compares as many atoms of one size, got {tuple(a.shape)} and {tuple(b.shape)}")
    return Atoms(a.flatten(1)[None], b.to(a.device).flatten(1)[None])


def _map(given: Any, label: str) -> Tensor:
    if not isinstance(given, (list, tuple)) or (given and np.ndim(given[0]) < 2):
        given = [given]
    if not given:
        raise ValueError(f"{label} has no factors")
    factors = [_tensor(each, label) for each in given]
    for factor in factors:
        if factor.dim() != 2 or not factor.numel():
            raise ValueError(
                f"{label}: a map is (inputs, outputs), or a list of such factors; got {tuple(factor.shape)}"
            )
    try:
        found = chain_products(factors)[-1]
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error
    if not bool(found.any()):
        raise ValueError(f"{label} is zero: no similarity is defined")
    return found


def _tensor(given: Any, label: str) -> Tensor:
    found = given.detach() if isinstance(given, Tensor) else torch.from_numpy(np.array(number_array(given, label)))
    if found.is_complex():
        raise TypeError(f"{label} is complex ({found.dtype}); compare real and imaginary parts")
    found = found.double()
    if bad := int((~torch.isfinite(found)).sum()):
        raise ValueError(f"{label} has {bad} values that are NaN or infinite")
    return found
