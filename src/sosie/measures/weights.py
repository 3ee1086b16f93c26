"""Measures of weights, without data: linear maps, weight tensors, filter atoms."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..stats import Atoms, LinearMaps, TensorPair, UncentredLinearMaps
from .define import define

# Linear CKA of the network without its activations

of_maps = functools.partial(
    define,
    bounds=(0, 1),
    closer="up",
    paper="wcka2025, wang2022",
    cost="d p q",
    chance="√(r s)/d for d inputs; 1/r = 1/d + Σ 1/width",
)


def _cosine(maps: LinearMaps) -> Tensor:
    return maps.xy / (maps.xx.sqrt() * maps.yy.sqrt())


@of_maps(reads=LinearMaps, invariant={"rotation", "scale", "shift"})
def wcka(maps: LinearMaps) -> Tensor:
    """Linear CKA of weights: cosine of centred W Wᵀ, with W (d, p) the network from its input, without activations.

    W = W₁W₂…W_ℓ for a chain of layers; the "rows" are the d entries of the input, and biases do not count. W is centred
    over these entries, as in equations 1 and 2 of the paper: the response to a constant input is left out. Invariant to
    all that keeps the product (neurons permuted, or rescaled and scaled back by the next layer), and to rotations of
    the outputs. Networks of independent Gaussian weights have about √(r s)/d, with 1/r = 1/d + Σ 1/width over the
    layers of one and s likewise of the other: √(p q / ((d + p)(d + q))) for one layer.
    """
    return _cosine(maps)


@of_maps(reads=UncentredLinearMaps, invariant={"rotation", "scale"})
def wcka_uncentred(maps: UncentredLinearMaps) -> Tensor:
    """Linear CKA of weights without centring: cosine of W Wᵀ, with W (d, p) the network without its activations.

    Equation 5 of the paper, ‖W₁ᵀW₂‖² / (‖W₁ᵀW₁‖ ‖W₂ᵀW₂‖): the response to a constant input counts too.
    """
    return _cosine(maps)


# Two tensors of weights of one shape, entry by entry or by their spectra

of_tensors = functools.partial(define, reads=TensorPair, cost="d weights", same_width=True)
by_spectrum = functools.partial(
    of_tensors,
    closer="down",
    invariant={"rotation", "scale"},
    cost="d min(p, d/p) for d weights of p neurons",
    chance="near 0 for two random tensors: a spectrum does not say which neuron is which",
    paired=False,
)


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
    """The singular values of one side as a matrix (neurons, all else), descending, made once.

    Callers that share `kept` between pairs hold the tensors meanwhile, so that their ids stay valid.
    """
    if side.requires_grad:
        return torch.linalg.svdvals(side.flatten(1))
    if id(side) not in kept:
        kept[id(side)] = torch.linalg.svdvals(side.flatten(1))
    return kept[id(side)]


@of_tensors(
    bounds=(-1, 1),
    closer="up",
    invariant={"scale"},
    paper="ilharco2023",
    chance="0, ±1/√d for d weights of mean 0; towards 1 where all weights have one sign, as scales of a norm do",
)
def weight_cosine(pair: TensorPair) -> Tensor:
    """Cosine of the two weight tensors, entry by entry.

    About 0 for networks trained from different seeds, whose neurons are in another order: match them first. For
    differences to a common base model it is the cosine of task vectors.
    """
    norm_x, norm_y = _norms(pair)
    return ((pair.x / norm_x) * (pair.y / norm_y)).sum()


@of_tensors(bounds=(0, 2), closer="down", invariant=set(), paper="neyshabur2020", chance="√2 for weights of mean 0")
def weight_distance(pair: TensorPair) -> Tensor:
    """Distance of the two tensors over their mean size: ‖X − Y‖ / √((‖X‖² + ‖Y‖²) / 2).

    Relative and symmetric, so that layers can be compared: √2 for orthogonal weights of any size, 2 for X and −X.
    Unlike the cosine, it depends on the difference in size.
    """
    size = ((pair.x.square().sum() + pair.y.square().sum()) / 2).sqrt()
    if float(size.detach()) == 0:
        raise ValueError("all weights of x and y are 0: there is no size that a distance could be relative to")
    return ((pair.x - pair.y) / size).norm()


@by_spectrum(bounds=(0, None), paper="rudelson2007")
def stable_rank_difference(pair: TensorPair) -> Tensor:
    """Difference of the stable ranks ‖W‖² / σ₁² of the two matrices (neurons, all else).

    A stable rank is between 1 (one direction holds all) and the number of rows or columns, whichever is smaller.
    """
    x, y = _spectra(pair)
    return (x[0] ** -2 - y[0] ** -2).abs()


@by_spectrum(bounds=(0, 2**0.5), paper="mirsky1960")
def spectrum_distance(pair: TensorPair) -> Tensor:
    """Distance of the sorted singular values of the two matrices (neurons, all else), each side of unit norm.

    √Σ(σᵢ − τᵢ)²: the least ‖UXV − Y‖ over all rotations U, V (Mirsky), so no order or rotation of neurons, here or in
    the layer below, brings the weights closer.
    """
    x, y = _spectra(pair)
    return (x - y).norm()


# Filter atoms, for models that share their coefficients

BLOCK = 2**22  # numbers that a block of pairs may take


@define(
    reads=Atoms,
    bounds=(-1, 1),
    closer="up",
    invariant={"scale"},
    paper="atoms2023",
    cost="m d for m atoms of d entries",
    chance="0, ±1/√(m d), for independent atoms; near 1 for models that started from the same",
    same_width=True,
)
def atom_cosine(atoms: Atoms) -> Tensor:
    """Cosine of the two sets of atoms, entry by entry: equation 3 of the paper.

    Meaningful only for models with the same coefficients. If these have orthonormal columns, it is the cosine of the
    whole weights; other coefficients (αR⁻¹ with atoms RD, the same network) give another value.
    """
    x, y = _flat(atoms.x, "x"), _flat(atoms.y, "y")
    return x @ y.mT


@define(
    reads=Atoms,
    bounds=(0, 1),
    closer="up",
    invariant={"linear"},
    paper="atoms2023, miao2021",
    cost="m² d for m atoms of d entries",
    chance="√(m/d) or up to a fifth less for independent atoms, 1 from m = d on",
    paired=False,
    same_width=True,
)
def atom_grassmann(atoms: Atoms) -> Tensor:
    """Mean cosine of the principal angles between the spans of two sets of atoms: equation 2 of the paper.

    As many atoms as entries span the whole space, and any two models would have 1, so that is an error.
    """
    _, m, d = atoms.x.shape
    if m >= d:
        raise ValueError(
            f"{m} atoms of {d} entries span all kernels: the value would be 1 whatever the models; take fewer than {d} "
            "atoms"
        )
    x, y = _basis(atoms.x, "x"), _basis(atoms.y, "y")
    rows = max(1, BLOCK // (len(y) * m * m))
    return torch.cat([torch.linalg.svdvals(part[:, None] @ y.mT).mean(-1) for part in x.split(rows)])


def _flat(atoms: Tensor, side: str) -> Tensor:
    flat = atoms.flatten(1)
    # Divided by the largest first, since squares of very small or large numbers are 0 or infinite.
    largest = flat.detach().abs().amax(1, keepdim=True)
    _refuse((largest == 0).flatten(), side, "all atoms are 0: they have no direction")
    flat = flat / largest
    return flat / flat.norm(dim=1, keepdim=True)


def _basis(atoms: Tensor, side: str) -> Tensor:
    """Orthonormal rows (N, m, d) with the span of the atoms."""
    q, r = torch.linalg.qr(atoms.mT)
    diagonal = r.detach().diagonal(dim1=-2, dim2=-1).abs()
    digits = torch.finfo(atoms.dtype).eps * atoms.shape[-1]
    lost = ~(diagonal.amin(-1) > digits * diagonal.amax(-1))
    _refuse(lost, side, f"the {atoms.shape[1]} atoms are linearly dependent: they span fewer directions")
    return q.mT


def _refuse(bad: Tensor, side: str, why: str) -> None:
    if bool(bad.any()):
        which = f"model {int(bad.nonzero()[0])} of {side}" if len(bad) > 1 else side
        raise ValueError(f"{which}: {why}")
