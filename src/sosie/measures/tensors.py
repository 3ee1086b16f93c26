"""Measures of two tensors of weights of one shape, entry by entry or by their spectra; no data."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stats import TensorPair
from .define import define


def _norms(pair: TensorPair) -> tuple[Tensor, Tensor]:
    norms = pair.x.norm(), pair.y.norm()
    if empty := [side for side, norm in zip("xy", norms, strict=True) if float(norm.detach()) == 0]:
        raise ValueError(f"all weights of {' and '.join(empty)} are 0: they have no direction and no spectrum")
    return norms


def _spectra(pair: TensorPair) -> tuple[Tensor, Tensor]:
    """Singular values of both sides, each scaled to unit norm."""
    if pair.x.ndim < 2 or min(pair.x.flatten(1).shape) < 2:
        raise ValueError(f"weights of shape {tuple(pair.x.shape)} are one vector: its spectrum is a single number")
    norm_x, norm_y = _norms(pair)
    return _singular_values(pair.x, pair.kept) / norm_x, _singular_values(pair.y, pair.kept) / norm_y


def _singular_values(side: Tensor, kept: dict[int, Tensor]) -> Tensor:
    """Of one side as a matrix (neurons, all else), the largest first.

    They are made once: whoever shares `kept` between pairs holds the tensors meanwhile, so that their ids last.
    """
    if side.requires_grad:
        return torch.linalg.svdvals(side.flatten(1))
    if id(side) not in kept:
        kept[id(side)] = torch.linalg.svdvals(side.flatten(1))
    return kept[id(side)]


@define(
    reads=TensorPair,
    bounds=(-1, 1),
    same=1,
    closer="up",
    invariant={"scale"},
    symmetric=True,
    paper="ilharco2023",
    cost="d weights",
    chance="0, ±1/√d for d weights of mean 0; towards 1 where all weights have one sign, as scales of a norm do",
    same_width=True,
)
def weight_cosine(pair: TensorPair) -> Tensor:
    """Cosine of the two tensors of weights, entry by entry.

    About 0 for networks trained from different seeds, whose neurons are in another order: match them first. Of
    differences to a common base model it is the cosine of task vectors.
    """
    norm_x, norm_y = _norms(pair)
    return ((pair.x / norm_x) * (pair.y / norm_y)).sum()


@define(
    reads=TensorPair,
    bounds=(0, 2),
    same=0,
    closer="down",
    invariant=set(),
    symmetric=True,
    paper="neyshabur2020",
    cost="d weights",
    chance="√2 for weights of mean 0",
    same_width=True,
)
def weight_distance(pair: TensorPair) -> Tensor:
    """Distance of the two tensors over their mean size: ‖X − Y‖ / √((‖X‖² + ‖Y‖²) / 2).

    Relative and symmetric, so that layers compare with each other: √2 for orthogonal weights whatever their sizes, 2
    for X and −X. Unlike the cosine it sees that one side is larger.
    """
    size = ((pair.x.square().sum() + pair.y.square().sum()) / 2).sqrt()
    if float(size.detach()) == 0:
        raise ValueError("all weights of x and y are 0: there is no size that a distance could be relative to")
    return ((pair.x - pair.y) / size).norm()


@define(
    reads=TensorPair,
    bounds=(0, None),
    same=0,
    closer="down",
    invariant={"rotation", "scale"},
    symmetric=True,
    paper="rudelson2007",
    cost="d min(p, d/p) for d weights of p neurons",
    chance="near 0 for two random tensors: a spectrum does not say which neuron is which",
    paired=False,
    same_width=True,
)
def stable_rank_difference(pair: TensorPair) -> Tensor:
    """Difference of the stable ranks ‖W‖² / σ₁² of the two matrices (neurons, all else).

    A stable rank is between 1 (one direction holds all) and the number of rows or columns, whichever is smaller.
    """
    x, y = _spectra(pair)
    return (x[0] ** -2 - y[0] ** -2).abs()


@define(
    reads=TensorPair,
    bounds=(0, 2**0.5),
    same=0,
    closer="down",
    invariant={"rotation", "scale"},
    symmetric=True,
    paper="mirsky1960",
    cost="d min(p, d/p) for d weights of p neurons",
    chance="near 0 for two random tensors: a spectrum does not say which neuron is which",
    paired=False,
    same_width=True,
)
def spectrum_distance(pair: TensorPair) -> Tensor:
    """Distance of the sorted singular values of the two matrices (neurons, all else), each side of unit norm.

    √Σ(σᵢ − τᵢ)²: the least ‖UXV − Y‖ over all rotations U, V (Mirsky), so no order or mixing of neurons, here or in
    the layer below, brings the weights nearer than this.
    """
    x, y = _spectra(pair)
    return (x - y).norm()
