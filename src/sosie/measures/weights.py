"""Measures of what networks are made of: linear CKA of their weights, without data."""

from __future__ import annotations

from torch import Tensor

from ..stats import LinearMaps, UncentredLinearMaps
from .define import define

CHANCE = "√(r s)/d for d inputs; 1/r = 1/d + Σ 1/width"


def _cosine(maps: LinearMaps) -> Tensor:
    return maps.xy / (maps.xx.sqrt() * maps.yy.sqrt())


@define(
    reads=LinearMaps,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    paper="wcka2025, wang2022",
    cost="d p q",
    chance=CHANCE,
)
def wcka(maps: LinearMaps) -> Tensor:
    """Linear CKA of weights: cosine of centred W Wᵀ, W (d, p) the network from its input on without activations.

    W = W₁W₂…W_ℓ for a chain of layers; the "rows" are the d entries of the input, and biases do not count. Centred over
    these entries, as equations 1 and 2 of the paper have it: what the network makes of a constant input is left out.
    Invariant to whatever leaves the product as it is (neurons permuted, or rescaled and scaled back by the next layer),
    and to rotations of the outputs. Networks of independent Gaussian weights give about √(r s)/d, with
    1/r = 1/d + Σ 1/width over the layers of one and s likewise of the other: √(p q / ((d + p)(d + q))) for one layer.
    """
    return _cosine(maps)


@define(
    reads=UncentredLinearMaps,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale"},
    symmetric=True,
    paper="wcka2025, wang2022",
    cost="d p q",
    chance=CHANCE,
)
def wcka_uncentred(maps: UncentredLinearMaps) -> Tensor:
    """Linear CKA of weights without centring: cosine of W Wᵀ, W (d, p) the network without its activations.

    Equation 5 of the paper, ‖W₁ᵀW₂‖² / (‖W₁ᵀW₁‖ ‖W₂ᵀW₂‖): what both make of a constant input counts as likeness.
    """
    return _cosine(maps)
